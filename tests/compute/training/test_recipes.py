"""Recipes change what a learner computes: groups of parameters, frozen ones, the objective, and held-out data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.training.learner import Learner
from swarmnode.compute.training.lm import load_segment
from swarmnode.compute.training.losses import next_token_loss
from swarmnode.compute.training.optimizer import memory_bytes
from swarmnode.compute.training.snapshot import gather, write_block
from swarmnode.swarm.records.run import RECIPE, ParameterGroup, Recipe, Run
from tests.compute.training.conftest import (
    MICROBATCHES,
    VOCABULARY,
    build,
    commit_all,
    ids_of,
    learners,
    make_run,
    pass_through,
    train,
)

Get = Callable[[str], Checkpoint]
WHOLE, THREE, STEPS = (0, 5), (0, 2, 4, 5), 5


def recipe_run(recipe: Recipe, **changes: Any) -> Run:
    return make_run(schedule=RECIPE, recipe=recipe, **changes)


def plain_losses(run: Run, smoothing: float = 0.0) -> list[float]:
    """A usual loop with torch's own optimiser and groups, for a Llama."""
    model = build("llama").train()
    groups = []
    for name, parameter in model.named_parameters():
        rate, decay, frozen = run.treat(name, parameter.dim())
        parameter.requires_grad_(not frozen)
        if not frozen:
            groups.append({"params": [parameter], "weight_decay": decay, "factor": rate})
    optimizer = torch.optim.AdamW(groups, lr=run.learning_rate, betas=run.betas, eps=run.epsilon)
    losses = []
    for step in range(STEPS):
        total = 0.0
        for index in range(MICROBATCHES):
            ids_BT = ids_of(step, index)
            logits_BTV = model(input_ids=ids_BT, use_cache=False).logits
            loss = functional.cross_entropy(
                logits_BTV[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten(), label_smoothing=smoothing
            )
            (loss / MICROBATCHES).backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_([one for one in model.parameters() if one.requires_grad], run.clip)
        for group in optimizer.param_groups:
            group["lr"] = run.learning_rate_at(step) * group["factor"]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total / MICROBATCHES)
    return losses


@pytest.mark.parametrize("recompute", [False, True])
def test_groups_and_frozen_parameters_are_those_of_a_plain_loop(checkpoint: Get, recompute: bool) -> None:
    groups = (
        ParameterGroup("*embed*", frozen=True),
        ParameterGroup("*layers.0.*", frozen=True),
        ParameterGroup("*layers.1.*", learning_rate=3.0, weight_decay=0.5),
        ParameterGroup("*norm*", frozen=True),
    )
    run = recipe_run(Recipe("hf-cosine", groups=groups))
    expected = plain_losses(run)
    for cuts in (WHOLE, THREE):
        chain = learners(checkpoint("llama"), run, cuts, recompute=recompute)
        assert train(chain, STEPS) == pytest.approx(expected, rel=1e-5)
    frozen = next(learner for learner in chain if learner.segment.start == 0)
    assert frozen.optimizer_bytes == 0, "frozen parameters need no memory"
    other = recipe_run(Recipe("hf-cosine"))
    assert expected != pytest.approx(plain_losses(other), rel=1e-4)


def test_a_segment_thaws_in_the_next_run(checkpoint: Get) -> None:
    segment = load_segment(checkpoint("llama"), 0, 5)
    Learner(segment, recipe_run(Recipe(groups=(ParameterGroup("*", frozen=True),))))
    run = make_run()
    expected = train(learners(checkpoint("llama"), run, WHOLE), 2)
    assert train([Learner(segment, run)], 2) == pytest.approx(expected, rel=1e-6)


def test_of_frozen_parameters_no_gradient_is_asked(checkpoint: Get) -> None:
    """Spot checks and float16 ask for all parameters of a layer."""
    run = recipe_run(Recipe(groups=(ParameterGroup("*mlp*", frozen=True),)))
    (learner,) = learners(checkpoint("llama"), run, WHOLE)
    pass_through([learner], 0)
    named = {name for name, one in learner.block(1).parameters.items() if not one.requires_grad}
    assert named and all("mlp" in name for name in named)
    assert all(bool((learner.block(1).parameters[name].grad == 0).all()) for name in named)


def test_label_smoothing_is_torchs(checkpoint: Get) -> None:
    run = recipe_run(Recipe(label_smoothing=0.2))
    assert train(learners(checkpoint("llama"), run, THREE), STEPS) == pytest.approx(plain_losses(run, 0.2), rel=1e-5)


def test_z_loss_is_the_mean_square_of_the_log_sum() -> None:
    logits_BTV = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))
    labels_BT = torch.tensor([[1, 2, -100, 4, 5], [1, -100, -100, 3, 2]])
    kept = labels_BT[:, 1:] != -100
    logs = torch.logsumexp(logits_BTV[:, :-1], -1)[kept]
    plain = next_token_loss(logits_BTV, labels_BT)
    assert float(next_token_loss(logits_BTV, labels_BT, z_loss=0.5)) == pytest.approx(
        float(plain + 0.5 * logs.square().mean()), rel=1e-6
    )
    assert float(next_token_loss(logits_BTV, torch.full((2, 5), -100))) == 0.0


@pytest.mark.parametrize("cuts", [WHOLE, THREE])
def test_held_out_data_change_nothing(checkpoint: Get, cuts: tuple[int, ...]) -> None:
    """They are counted, without dropout and without smoothing; losses and gradients are as without them."""
    kept = {"label_smoothing": 0.1}
    plain = recipe_run(Recipe(**kept))
    evaluates = recipe_run(Recipe(evaluate_every=2, evaluation=2, **kept))
    expected = train(learners(checkpoint("gpt2-dropout"), plain, cuts), 3)
    chain = learners(checkpoint("gpt2-dropout"), evaluates, cuts)
    losses, held_out = [], []
    for step in range(3):
        numbers = evaluates.passes(step)
        found = [pass_through(chain, number, lease=number) for number in reversed(numbers)][::-1]
        losses.append(sum(found[:MICROBATCHES]) / MICROBATCHES)
        held_out += found[MICROBATCHES:]
        everything = (1 << len(numbers)) - 1
        assert all(mask == everything for learner in chain for mask in learner.counted.values())
        assert all(learner.count_of(learner.segment.start) == MICROBATCHES for learner in chain)
        with pytest.raises(ValueError, match="no microbatch"):
            pass_through(chain, len(numbers))
        commit_all(chain)
    assert losses == pytest.approx(expected, rel=1e-6) and len(held_out) == 4
    model = build("gpt2-dropout").eval()
    ids_BT = ids_of(0, MICROBATCHES)
    with torch.no_grad():
        assert held_out[0] == pytest.approx(float(model(input_ids=ids_BT, labels=ids_BT).loss), rel=1e-5)
    assert int(ids_BT.max()) < VOCABULARY


def test_the_average_of_the_weights_is_torchs(checkpoint: Get, tmp_path: Path) -> None:
    """Whichever stages hold it, and after another peer took over from a saved state; held-out data go through it."""
    kind, frozen = "gpt2", ParameterGroup("*.h.0.*", frozen=True)
    run = recipe_run(Recipe(ema=0.7, groups=(frozen,), evaluate_every=1, evaluation=1))
    (whole,) = chain = learners(checkpoint(kind), run, WHOLE)
    model = build(kind)
    reference: Any = AveragedModel(build(kind), multi_avg_fn=get_ema_multi_avg_fn(0.7))
    heirs, held_out = learners(checkpoint(kind), run, THREE), MICROBATCHES
    for step in range(STEPS):
        assert pass_through(heirs, held_out) == pytest.approx(pass_through(chain, held_out), rel=1e-6)
        reference.eval()
        ids_BT = ids_of(step, held_out)
        with torch.no_grad():
            expected = float(reference(input_ids=ids_BT, labels=ids_BT).loss)
        assert pass_through(chain, held_out, lease=9) == pytest.approx(expected, rel=1e-5)
        train(chain, 1)
        train(heirs, 1)
        model.load_state_dict(dict(named(whole, "parameter")), strict=False)
        reference.update_parameters(model)
        if step == 2:
            taken = learners(checkpoint(kind), run, THREE)
            for one, heir in zip(heirs, taken, strict=True):
                heir.step = one.step
                for block in one.blocks:
                    heir.load(block, one.state(block))
            heirs = taken
    averages = {**dict(named(whole, "parameter")), **dict(named(whole, "ema"))}
    for name, average in reference.module.named_parameters():
        torch.testing.assert_close(averages[name], average, rtol=0, atol=0)
    of_stages = {name: tensor for heir in heirs for name, tensor in named(heir, "ema")}
    assert of_stages.keys() == dict(named(whole, "ema")).keys() and not any(".h.0." in name for name in of_stages)
    paths = [tmp_path / str(block) for block in whole.blocks]
    for block, path in zip(whole.blocks, paths, strict=True):
        write_block(path, whole.state(block), step=STEPS, block=block, run=run.id)
    assert all(torch.equal(tensor, averages[name]) for name, tensor in gather(paths).items())
    assert all(torch.equal(gather(paths, average=False)[name], one) for name, one in named(whole, "parameter"))
    estimated = sum(memory_bytes(run, whole.block(number).parameters) for number in whole.blocks)
    assert estimated == whole.optimizer_bytes, "the ledger counts the average"


def named(learner: Learner, part: str) -> list[tuple[str, torch.Tensor]]:
    states = (learner.state(block) for block in learner.blocks)
    return [(key.split("/", 1)[1], one) for state in states for key, one in state.items() if key.startswith(part + "/")]


def test_an_evaluation_between_the_passes_of_a_microbatch_changes_nothing(checkpoint: Get) -> None:
    run = recipe_run(Recipe(ema=0.5, evaluate_every=1, evaluation=1))
    plain, between = learners(checkpoint("llama"), run, WHOLE)[0], learners(checkpoint("llama"), run, WHOLE)[0]
    for learner in (plain, between):
        train([learner], 2)
        values = (ids_of(2, 0),)
        learner.forward(0, 0, 0, 5, values, values)
        if learner is between:
            pass_through([learner], MICROBATCHES, lease=1)
        learner.backward(0, ())
    assert torch.equal(plain.gradient(plain.blocks).copy(), between.gradient(between.blocks).copy())
