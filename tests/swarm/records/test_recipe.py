"""Recipes: transformers' schedules by their names, groups of parameters by patterns, and what earlier versions make of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from transformers import optimization

from swarmnode.errors import ProtocolError, UsageError
from swarmnode.swarm.records.run import (
    NO_DECAY,
    RECIPE,
    SCHEDULES,
    ParameterGroup,
    Recipe,
    Run,
    Treatment,
    check_run,
    decode_run,
    differences,
    encode_run,
)

STEPS, WARMUP, DECAY = 23, 4, 7
BARE = Run(data=bytes(32), steps=STEPS, batch=4, microbatch=2, warmup_steps=WARMUP, learning_rate=0.5)


def run_of(recipe: Recipe, **changes: Any) -> Run:
    return msgspec.structs.replace(BARE, schedule=RECIPE, recipe=recipe, **changes)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("hf-constant", lambda one: optimization.get_constant_schedule_with_warmup(one, WARMUP)),
        ("hf-linear", lambda one: optimization.get_linear_schedule_with_warmup(one, WARMUP, STEPS)),
        ("hf-cosine", lambda one: optimization.get_cosine_schedule_with_warmup(one, WARMUP, STEPS)),
        ("hf-wsd", lambda one: optimization.get_wsd_schedule(one, WARMUP, DECAY, STEPS)),
    ],
)
def test_schedules_are_transformers(name: str, make: Callable[[Any], Any]) -> None:
    run = run_of(Recipe(name, decay_steps=DECAY))
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=run.learning_rate)
    scheduler = make(optimizer)
    for step in range(STEPS):
        assert run.learning_rate_at(step) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12), step
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_of_before_are_the_same_in_a_recipe(schedule: str) -> None:
    before = msgspec.structs.replace(BARE, schedule=schedule)
    after = run_of(Recipe(schedule))
    rates = [[run.learning_rate_at(step) for step in range(STEPS)] for run in (before, after)]
    assert rates[0] == rates[1]


def test_the_first_group_that_matches_counts() -> None:
    groups = (ParameterGroup("*layers.0.*", frozen=True), ParameterGroup("*q_proj*", learning_rate=0.1), *NO_DECAY)
    run = run_of(Recipe(groups=groups), weight_decay=0.2)
    assert run.treat("model.layers.0.q_proj.weight", 2) == Treatment(1.0, 0.2, True)
    assert run.treat("model.layers.1.q_proj.weight", 2) == Treatment(0.1, 0.2, False)
    assert run.treat("model.layers.1.k_proj.weight", 2) == Treatment(1.0, 0.2, False)
    assert run.treat("model.norm.weight", 1) == Treatment(1.0, 0.0, False)
    assert run.treat("model.embed_tokens.weight", 2) == Treatment(1.0, 0.0, False)
    assert BARE.treat("model.embed_tokens.weight", 2).weight_decay == BARE.weight_decay, "runs of before decay it"


def test_runs_of_before_keep_their_bytes_and_others_are_told_apart() -> None:
    assert b"recipe" not in encode_run(BARE)
    run = run_of(Recipe(z_loss=1e-4))
    assert decode_run(encode_run(run)) == run
    assert differences(run, run_of(Recipe())) == ["The setting 'recipe z_loss' is 0.0001 here and 0.0 there."]
    assert any("recipe" in told for told in differences(run, BARE))


def test_a_version_that_knows_no_recipes_names_the_schedule() -> None:
    raw: dict[str, Any] = msgspec.msgpack.decode(encode_run(run_of(Recipe())))
    del raw["recipe"]  # what it does not know, it ignores
    with pytest.raises(ProtocolError, match="a schedule out of constant, linear, cosine"):
        decode_run(msgspec.msgpack.encode(raw))


@pytest.mark.parametrize(
    ("recipe", "told"),
    [
        (Recipe("zigzag"), "a schedule out of"),
        (Recipe(groups=(ParameterGroup("*" * 5),)), "at most 4 stars"),
        (Recipe(groups=(ParameterGroup("[a-z]"),)), "without brackets"),
        (Recipe(evaluate_every=3), "held-out microbatches"),
        (Recipe(ema=1.0), "less than all of itself"),
        (Recipe(evaluate_every=3, evaluation=2047), "with the held-out ones"),
    ],
)
def test_recipes_that_are_not_valid_are_refused(recipe: Recipe, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        check_run(run_of(recipe))
    with pytest.raises(UsageError, match="a recipe only with"):
        check_run(msgspec.structs.replace(BARE, recipe=Recipe()))


@pytest.mark.parametrize(
    "bad",
    [
        {"groups": [{"match": "x" * 65}]},
        {"groups": [{"match": "x"}] * 17},
        {"label_smoothing": 2.0},
        {"z_loss": -1.0},
        {"router_balance": -1.0},
        {"unknown": 1},
    ],
)
def test_what_is_out_of_bounds_is_not_decoded(bad: dict[str, Any]) -> None:
    raw: dict[str, Any] = msgspec.msgpack.decode(encode_run(run_of(Recipe())))
    with pytest.raises(ProtocolError):
        decode_run(msgspec.msgpack.encode({**raw, "recipe": {**raw["recipe"], **bad}}))


def test_held_out_microbatches_are_of_some_steps() -> None:
    run = run_of(Recipe(evaluate_every=10, evaluation=3))
    assert [step for step in range(STEPS) if run.evaluations_at(step)] == [0, 10, 20]
    assert run.passes(10) == range(5) and run.passes(11) == range(2)
    assert run.passes(STEPS) == range(2, 5), "behind the last step, by the final weights"
    assert run_of(Recipe()).passes(STEPS) == range(2, 2)
