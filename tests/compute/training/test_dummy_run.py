"""Dummy runs: they take time, and leave nothing behind."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.training.learner import Learner
from swarmnode.compute.training.lm import load_segment
from swarmnode.errors import CheckpointError, NotFinite
from swarmnode.training.worker.training_parts import BUDGET_S, FEWEST_PASSES, MOST_PASSES, dummy_run_s
from tests.compute.training.conftest import learners, make_run, pass_through
from tests.compute.training.toy import ToySegment

Get = Callable[[str], Checkpoint]


def clock(pass_s: float) -> Callable[[], float]:
    """Looked at as each pass begins and ends."""
    ticks = itertools.count()
    return lambda: pass_s * next(ticks)


@pytest.mark.parametrize("kind", ["gpt2-dropout", "llama"])
@pytest.mark.parametrize("recompute", [False, True])
def test_training_goes_on_as_if_nothing_had_been_run(kind: str, recompute: bool, checkpoint: Get) -> None:
    tried = learners(checkpoint(kind), make_run(), (0, 2, 5), recompute=recompute)
    usual = learners(checkpoint(kind), make_run(), (0, 2, 5), recompute=recompute)
    for learner in tried:
        assert dummy_run_s(learner, learner.segment.start, learner.segment.end, clock(1.0)) == 1.0
        assert learner.in_flight == 0 and not any(learner.counted.values())
    for index in range(2):
        assert pass_through(tried, index) == pass_through(usual, index)
    for one, other in zip(tried, usual, strict=True):
        assert torch.equal(one.gradient(one.blocks).copy(), other.gradient(other.blocks).copy())


@pytest.mark.parametrize(("pass_s", "passes"), [(BUDGET_S, FEWEST_PASSES), (BUDGET_S / 100, MOST_PASSES)])
def test_long_passes_are_few(pass_s: float, passes: int, checkpoint: Get) -> None:
    looks = [0]

    def now() -> float:
        looks[0] += 1
        return pass_s * looks[0]

    learner = Learner(load_segment(checkpoint("llama"), 0, 2), make_run())
    assert dummy_run_s(learner, 0, 2, now) == pytest.approx(pass_s)
    assert looks[0] == 2 * passes


def test_nobody_makes_up_what_only_the_data_knows() -> None:
    with pytest.raises(CheckpointError, match="only their data"):
        dummy_run_s(Learner(ToySegment(), make_run()), 0, 3, clock(1.0))


def test_units_that_make_nan_of_it_leave_nothing_either(checkpoint: Get) -> None:
    segment = load_segment(checkpoint("llama"), 2, 4)
    learner = Learner(segment, make_run())
    with torch.no_grad():
        for parameter in segment.parameters()[3].values():
            parameter.fill_(float("nan"))
    with pytest.raises(NotFinite):
        dummy_run_s(learner, 2, 4, clock(1.0))
    assert learner.in_flight == 0
