"""Step progress: what stages and trainers tell of one step."""

from __future__ import annotations

from typing import Any, cast

import pytest

from swarmnode.codec.training_messages import Condition, Status
from swarmnode.errors import ProtocolError
from swarmnode.plan.training.step_ledger import StepLedger
from swarmnode.plan.view import Span
from swarmnode.roles.training.coordinator.leases import OutstandingLease
from swarmnode.roles.training.coordinator.step_progress import StepProgress
from swarmnode.roles.training.coordinator.worker_handle import WorkerHandle
from swarmnode.roles.training.worker.status import counted_of

FIRST, LAST = Span(0, 1), Span(1, 2)


def stage(peer: str, span: Span) -> WorkerHandle:
    member = WorkerHandle(peer, cast("Any", None), lambda: 0.0)
    member.worker.span = span
    return member


def counted(span: Span, mask: int, *losses: float) -> Status:
    masks = counted_of(dict.fromkeys(range(*span), mask))
    return Status(1, Condition.READY, *span, b"", 0, masks, losses=losses)


@pytest.fixture
def step_progress() -> StepProgress:
    """Three microbatches, two units with a stage each."""
    step_progress = StepProgress(StepLedger(0, 2, 3), 0.0)
    step_progress.enter([stage("first", FIRST), stage("last", LAST)])
    return step_progress


def test_what_a_trainer_has_back_counts_everywhere(step_progress: StepProgress) -> None:
    for number, loss in enumerate((1.0, 2.0, 6.0)):
        assert number in step_progress.ledger.missing()
        step_progress.count(OutstandingLease(number, number, (("first", FIRST), ("last", LAST))), loss)
    assert step_progress.ledger.complete() and step_progress.loss == pytest.approx(3.0)


def test_the_last_stage_tells_losses_of_what_it_has_counted(step_progress: StepProgress) -> None:
    step_progress.take(stage("last", LAST), counted(LAST, 0b101, 4.0, 8.0))
    assert step_progress.loss == pytest.approx(6.0)
    step_progress.take(stage("first", FIRST), counted(FIRST, 0b111))
    assert step_progress.loss == pytest.approx(6.0) and step_progress.ledger.missing() == [1]


def test_what_a_stage_says_replaces_what_was_known_or_adds_to_it(step_progress: StepProgress) -> None:
    step_progress.take(stage("first", FIRST), counted(FIRST, 0b001))
    step_progress.add(stage("first", FIRST), counted(FIRST, 0b010))
    assert step_progress.ledger.peers["first"].mask(0) == 0b011
    step_progress.take(stage("first", FIRST), counted(FIRST, 0b010))
    assert step_progress.ledger.peers["first"].mask(0) == 0b010


def test_a_microbatch_that_the_step_does_not_have(step_progress: StepProgress) -> None:
    with pytest.raises(ProtocolError):
        step_progress.take(stage("first", FIRST), counted(FIRST, 0b1000))
