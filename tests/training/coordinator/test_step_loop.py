"""What a step loop expects of its steps, among stages that come one after another."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from swarmnode.plan.training.coordination import Event
from swarmnode.plan.training.step_ledger import OutstandingLease, StepLedger
from swarmnode.plan.view import Span
from swarmnode.training.coordinator.averaging_groups import WarmStarts
from swarmnode.training.coordinator.step_loop import StepLoop
from tests.peer.training_swarm import toy_batches, toy_run

STEP_S = 12.0  # of one stage alone
STAGES = ("a", "b", "c")
LEASE = OutstandingLease(0, 0, (("a", Span(0, 1)),))


class Stages:
    """Of which each holds the whole model; `here` are those that can be used."""

    def __init__(self) -> None:
        self.here: list[str] = []
        self.ledger = StepLedger(0, 1, range(0))

    def usable(self) -> list[Any]:
        return [SimpleNamespace(peer=name, span=Span(0, 1)) for name in self.here]

    def hearing(self, _step: int) -> list[Any]:
        return self.usable()

    def uncovered(self, _units: int) -> bool:
        return not self.here

    def begin(self, _run: object, ledger: StepLedger) -> None:
        self.ledger = ledger

    def passing_s(self, _step: int, _microbatches: int) -> float:
        return STEP_S / len(self.here)

    def dispatch(self) -> None:
        self.ledger.grant(LEASE)


@pytest.fixture
def stages() -> Stages:
    return Stages()


@pytest.fixture
def loop(stages: Stages) -> StepLoop:
    office = SimpleNamespace(units=1, failures=SimpleNamespace(rests=lambda _peer: False), clock=lambda: 0.0)
    groups = SimpleNamespace(warm_starts=WarmStarts(), expected_s=lambda *_: 0.0)
    shared: Any = (office, stages, stages, None, groups, lambda: False)
    return StepLoop(toy_run(toy_batches(), 3), 0, *shared)


def test_stages_that_come_before_anything_is_counted_are_reckoned_with(loop: StepLoop, stages: Stages) -> None:
    """Of those that are called at once the first one to answer begins the step."""
    assert loop.expected_s == 0.0
    for count in range(1, len(STAGES) + 1):
        stages.here = list(STAGES[:count])
        loop.has_come(Event.COUNTED)
        assert loop.expected_s == pytest.approx(STEP_S / count)


def test_once_something_is_counted_what_was_expected_stays(loop: StepLoop, stages: Stages) -> None:
    stages.here = ["a", "b"]
    loop.has_come(Event.COUNTED)
    for stage in stages.usable():
        stages.ledger.report(stage.peer, stage.span, {})
    stages.ledger.done(LEASE, 1.0)
    assert loop.counted == 1
    stages.here = ["a", "b", "c"]
    loop.has_come(Event.COUNTED)
    assert loop.expected_s == pytest.approx(STEP_S / 2)
