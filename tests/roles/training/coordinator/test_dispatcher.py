"""Dispatcher: whose word on a lease counts."""

from __future__ import annotations

from typing import Any, cast

import pytest

from swarmnode.codec.messages import Body
from swarmnode.codec.training_messages import Failed, Lease, Release
from swarmnode.errors import ErrorCode
from swarmnode.plan.training.step_ledger import StepLedger
from swarmnode.plan.training.wiring import Replica
from swarmnode.plan.view import Span
from swarmnode.roles.training.coordinator.dispatcher import Dispatcher
from swarmnode.roles.training.coordinator.trainer_connections import TrainerConnections, TrainerLine
from swarmnode.roles.training.coordinator.worker_handle import WorkerHandle, WorkerState
from tests.roles.training.scene import RUN

UNITS = 3


class Line:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.open = True
        self.told: list[Body] = []

    def send(self, body: Body) -> None:
        self.told.append(body)


class Office:
    """A stage that holds everything, and two trainers who take one microbatch each."""

    def __init__(self) -> None:
        self.stage = Line()
        member = WorkerHandle("stage", cast("Any", self.stage), WorkerState.USABLE, worker=Replica(Span(0, UNITS)))
        trainer_connections = TrainerConnections()
        self.trainers = [TrainerLine(cast("Any", Line()), RUN, 1) for _ in range(2)]
        for trainer in self.trainers:
            trainer_connections.add(trainer, 0)
        self.dispatcher = Dispatcher(1, UNITS, {"stage": member}, trainer_connections)
        ledger = StepLedger(0, UNITS, RUN.microbatches)
        ledger.report("stage", Span(0, UNITS), {})
        self.dispatcher.dispatch(ledger)
        self.leases = [self._lease(trainer) for trainer in self.trainers]

    @staticmethod
    def _lease(trainer: TrainerLine) -> int:
        (told,) = cast("Any", trainer.channel).told
        assert isinstance(told, Lease) and trainer.leases == {told.lease}
        return told.lease


@pytest.fixture
def office() -> Office:
    return Office()


def test_a_microbatch_is_done_once_and_by_whom_it_was_given_to(office: Office) -> None:
    one, other = office.trainers
    assert office.dispatcher.done(other, office.leases[0]) is None
    assert len(office.dispatcher.outstanding_leases) == 2, "it is still out"
    outstanding = office.dispatcher.done(one, office.leases[0])
    assert outstanding is not None and outstanding.lease == office.leases[0]
    assert office.dispatcher.done(one, office.leases[0]) is None


def test_nobody_gives_up_what_is_another_ones(office: Office) -> None:
    one, other = office.trainers
    given_up = Failed(office.leases[0], "stage", ErrorCode.PEER_LOST)
    office.dispatcher.failed(other, given_up)
    assert not office.stage.told and other.leases == {office.leases[1]}
    office.dispatcher.failed(one, given_up)
    assert office.stage.told == [Release((office.leases[0],))]
