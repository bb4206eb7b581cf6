"""Dispatcher: whose word on a lease counts."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest

from swarmnode.codec.body import Body
from swarmnode.codec.training_messages import Done, Failed, Lease, Release
from swarmnode.errors import ErrorCode
from swarmnode.plan.training.step_ledger import OutstandingLease, StepLedger
from swarmnode.plan.training.wiring import Replica
from swarmnode.plan.view import Span
from swarmnode.training.coordinator.dispatcher import Dispatcher, TrainerConnections, TrainerLine
from swarmnode.training.coordinator.link_times import Failures
from swarmnode.training.coordinator.worker_group import WorkerHandle, WorkerState
from tests.peer.training_swarm import NoLinkTimes
from tests.training.scene import KEY, RUN

UNITS = 3


class Line:
    """Keeps what it is told."""

    rtt_s = 0.0

    def __init__(self, peer: str) -> None:
        self.open = True
        self.peer = peer
        self.told: list[Body] = []

    def send(self, body: Body) -> None:
        self.told.append(body)


class Office:
    """A stage that holds everything, and two trainers who take one microbatch each."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.stage = Line("stage")
        clock = lambda: self.now_s  # noqa: E731
        self.member = WorkerHandle(
            "stage", cast("Any", self.stage), clock, WorkerState.USABLE, worker=Replica(Span(0, UNITS))
        )
        trainer_connections = TrainerConnections()
        self.trainers = [TrainerLine(cast("Any", Line(name)), RUN, 1) for name in ("one", "other")]
        for trainer in self.trainers:
            trainer_connections.add(trainer, 0)
        self.strikes = Failures(clock)
        links = cast("Any", NoLinkTimes())
        self.members = {"stage": self.member}
        self.dispatcher = Dispatcher(UNITS, self.members, trainer_connections, self.strikes, links, clock=clock)
        self.dispatcher.term, self.dispatcher.key = 1, KEY
        self.ledger = StepLedger(0, UNITS, range(RUN.microbatches))
        self.dispatcher.begin(RUN, self.ledger)
        self.ledger.report("stage", Span(0, UNITS), {})
        self.dispatcher.dispatch()
        self.leases = [self._lease(trainer) for trainer in self.trainers]

    def _lease(self, trainer: TrainerLine) -> int:
        (told,) = cast("Any", trainer.channel).told
        assert isinstance(told, Lease) and [record.lease for record in self.held(trainer)] == [told.lease]
        assert told.run == RUN.id and told.within_s > 0 and told.seal
        return told.lease

    def held(self, trainer: TrainerLine) -> list[OutstandingLease]:
        return self.ledger.held_by(trainer.peer)

    def release(self, lease: int) -> OutstandingLease:
        """The stage has forgotten it."""
        record = self.ledger.released(lease, self.member.peer)
        assert record is not None
        return record


@pytest.fixture
def office() -> Office:
    return Office()


def test_a_microbatch_is_done_once_and_by_whom_it_was_given_to(office: Office) -> None:
    one, other = office.trainers
    done = Done(office.leases[0], 1.0, RUN.id)
    office.dispatcher.done(other, done)
    assert len(office.ledger.leases) == 2 and 0 in office.ledger.missing(), "it is still out"
    office.dispatcher.done(one, done)
    assert [record.lease for record in office.ledger.leases] == [office.leases[1]] and 0 not in office.ledger.missing()
    office.dispatcher.done(one, Done(office.leases[0], 5.0, RUN.id))
    assert office.ledger.loss == 1.0, "once"


def test_a_loss_that_no_stage_would_have_let_pass_is_its_tellers_fault(office: Office) -> None:
    one, _ = office.trainers
    office.dispatcher.done(one, Done(office.leases[0], math.nan, RUN.id))
    assert 0 in office.ledger.missing()
    assert office.dispatcher.blame(office.release(office.leases[0])) == {"one"}


def test_nobody_gives_up_what_is_another_ones(office: Office) -> None:
    one, other = office.trainers
    given_up = Failed(office.leases[0], "stage", ErrorCode.PEER_LOST, run=RUN.id)
    office.dispatcher.failed(other, given_up)
    assert not office.stage.told and office.held(other)
    office.dispatcher.failed(one, given_up)
    assert office.stage.told == [Release((office.leases[0],), RUN.id)]


def test_who_failed_is_left_alone_for_a_while(office: Office) -> None:
    one, _ = office.trainers
    office.dispatcher.failed(one, Failed(office.leases[0], "stage", ErrorCode.INTERNAL, run=RUN.id))
    assert office.dispatcher.blame(office.release(office.leases[0])) == {"one", "stage"}
    office.dispatcher.dispatch()
    assert not office.held(one), "not at once"
    office.now_s += 1.0
    office.dispatcher.dispatch()
    assert office.held(one)


def test_labels_that_did_not_come_are_their_trainers_fault(office: Office) -> None:
    one, _ = office.trainers
    office.dispatcher.failed(one, Failed(office.leases[0], "stage", ErrorCode.NOT_FOUND, run=RUN.id))
    assert office.dispatcher.blame(office.release(office.leases[0])) == {"one"}


def test_a_lease_that_is_late_is_called_back_from_trainer_and_stages(office: Office) -> None:
    one, _ = office.trainers
    office.now_s += 1000.0
    office.dispatcher.expire()
    called = [body for body in cast("Any", one.channel).told if isinstance(body, Release)]
    assert called == [Release((office.leases[0],), RUN.id)] and not office.ledger.out
    office.ledger.report("stage", Span(0, UNITS), dict.fromkeys(range(UNITS), 1))
    record = office.release(office.leases[0])
    assert record.number == 0
    assert office.dispatcher.blame(record) == {"one", "stage"}, "counted, and not brought back"


def test_nobody_else_is_blamed_for_a_stage_that_is_lost(office: Office) -> None:
    office.dispatcher.lose("stage")
    for record in office.ledger.leases:
        assert office.dispatcher.blame(record) == frozenset()


def test_a_stage_that_is_not_measured_yet_is_forecast_to_be_as_fast_as_most() -> None:
    office = Office()
    assert office.dispatcher.passing_s(0, 10) == 0.0, "nobody is measured"
    office.member.worker.unit_s = 0.5
    assert office.dispatcher.passing_s(0, 10) == pytest.approx(10 * UNITS * 0.5)
    newcomer = Replica(Span(0, UNITS))
    office.members["new"] = WorkerHandle(
        "new", cast("Any", Line("new")), lambda: 0.0, WorkerState.USABLE, worker=newcomer
    )
    assert office.dispatcher.passing_s(0, 10) == pytest.approx(5 * UNITS * 0.5, rel=0.25)
    assert newcomer.unit_s == 0.0, "which is told by itself alone"
