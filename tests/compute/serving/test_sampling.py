"""Draws depend on logits, parameters, row and position, and on nothing else; and they follow the distribution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from swarmnode.codec.sampling import Sampling
from swarmnode.compute.serving.sampler import candidates, may_draw, sample, sample_candidates, uniform


@dataclass(frozen=True)
class Parameters:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0


LOGITS_BV = torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.0, 3.0, 0.0, 0.0]])


def test_greedy():
    assert sample(LOGITS_BV, Sampling(prompt_length=1, max_new_tokens=1), 5).tolist() == [0, 1]


def test_the_same_draw_twice_whatever_came_between():
    parameters = Parameters(seed=7)
    drawn = [sample(LOGITS_BV, parameters, position).tolist() for position in range(50)]
    torch.rand(100)
    assert [sample(LOGITS_BV, parameters, position).tolist() for position in range(50)] == drawn
    assert [sample(LOGITS_BV, Parameters(seed=8), position).tolist() for position in range(50)] != drawn
    row_1 = [sample(LOGITS_BV[1:], parameters, position, rows=[1]).item() for position in range(50)]
    assert row_1 == [ids[1] for ids in drawn]


def test_other_dtypes_draw_the_same():
    parameters = Parameters(seed=1)
    drawn = [sample(LOGITS_BV, parameters, position).tolist() for position in range(30)]
    assert [sample(LOGITS_BV.bfloat16(), parameters, position).tolist() for position in range(30)] == drawn


@pytest.mark.parametrize(
    ("parameters", "kept"),
    [
        (Parameters(), {0, 1, 2, 3}),
        (Parameters(top_k=2), {0, 1}),
        (Parameters(top_p=0.5), {0}),
        (Parameters(top_p=0.7), {0, 1}),
        (Parameters(top_k=3, top_p=0.95), {0, 1, 2}),
        (Parameters(temperature=0.01), {0}),
        (Parameters(top_k=99), {0, 1, 2, 3}),
        (Parameters(min_p=0.3), {0, 1}),
    ],
)
def test_the_distribution(parameters, kept):
    rows = range(100)
    logits_BV = LOGITS_BV[:1].expand(len(rows), -1)
    draws = torch.cat([sample(logits_BV, parameters, position, rows=[*rows]) for position in range(30)])
    frequencies = torch.bincount(draws, minlength=4) / len(draws)
    assert {index for index in range(4) if frequencies[index] > 0} == kept
    mask = torch.tensor([index in kept for index in range(4)])
    wanted = torch.softmax((LOGITS_BV[0] / parameters.temperature).masked_fill(~mask, float("-inf")), 0)
    assert (frequencies - wanted).abs().max() < 0.04


def test_uniform_numbers_are_the_documented_ones():
    """A stranger's implementation must draw these."""
    assert uniform(0, 0, 0) == pytest.approx(0.868510408050094, abs=1e-15)
    numbers = torch.tensor([uniform(3, row, position) for row in range(10) for position in range(300)])
    assert abs(numbers.mean() - 0.5) < 0.02
    assert numbers.min() >= 0
    assert numbers.max() < 1


@pytest.mark.parametrize("parameters", [Parameters(), Parameters(top_p=0.97), Parameters(top_k=700, temperature=3.0)])
def test_a_large_vocabulary_is_drawn_from_as_defined(parameters):
    """Only the head of the order is computed at first; the draws are those of the whole order, ties by id."""
    logits_V = torch.randn(5000, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    ordered, ids = torch.sort(logits_V, descending=True, stable=True)
    kept = parameters.top_k or len(ids)
    cumulated = torch.softmax(ordered[:kept].double() / parameters.temperature, 0).cumsum(0)
    if parameters.top_p < 1:
        cumulated = cumulated[: int((cumulated < parameters.top_p).sum()) + 1]
    for position in range(120):
        number = uniform(0, 0, position) * cumulated[-1]
        wanted = ids[(cumulated <= number).sum()]
        assert sample(logits_V[None], parameters, position).item() == wanted


@pytest.mark.parametrize("top_k", [0, 1, 50])
@pytest.mark.parametrize("top_p", [0.3, 0.95, 1.0])
@pytest.mark.parametrize("vocabulary", [40, 5000])
def test_the_largest_logits_alone_draw_the_same_or_say_that_they_are_too_few(
    vocabulary: int, top_p: float, top_k: int
) -> None:
    generator = torch.Generator().manual_seed(3)
    parameters = Parameters(temperature=0.8, top_p=top_p, top_k=top_k, seed=5)
    drawn = 0
    for position in range(30):
        logits_BV = torch.randn(2, vocabulary, generator=generator) * (position % 5 + 1)
        if position % 3 == 0:
            logits_BV = logits_BV.round()  # ties
        ids_B = sample_candidates(
            candidates(logits_BV, parameters.top_k, parameters.temperature), vocabulary, parameters, position
        )
        if ids_B is not None:
            drawn += 1
            assert torch.equal(ids_B, sample(logits_BV, parameters, position))
    assert drawn >= 5


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.7},
        {"top_p": 0.9},
        {"top_k": 40},
        {"min_p": 0.05},
        {"top_p": 0.8, "top_k": 20, "temperature": 1.3},
    ],
    ids=str,
)
@pytest.mark.parametrize("scale", [0.05, 1.0, 4.0], ids=["flat", "usual", "peaked"])
def test_what_rounding_draws_may_be_drawn_and_most_else_may_not(changes: dict[str, Any], scale: float) -> None:
    generator, spread = torch.Generator().manual_seed(5), 0.02 * scale
    sampling = Sampling(0, 100, **{"temperature": 1.0, "seed": 7, **changes})
    allowed = moved = 0
    for position in range(100):
        logits_V = scale * torch.randn(512, generator=generator)
        noisy_V = logits_V + spread * (2 * torch.rand(512, generator=generator) - 1)
        (drawn,), (exact,) = (sample(one_V[None], sampling, position).tolist() for one_V in (noisy_V, logits_V))
        moved += drawn != exact
        assert may_draw(drawn, logits_V, sampling, position, spread=spread)
        allowed += may_draw((exact + 137) % 512, logits_V, sampling, position, spread=spread)
    assert moved > 0 and allowed < 40
