"""Dispatcher: it leases the missing microbatches to trainers, along the best routes, and calls leases back.

The leases of a step are in its ledger (`plan/training/step_ledger.py`) only. The dispatcher keeps the rest, which outlives
a step: the key of the seals, the loads of links, the durations of leases, and the trainers that have proven themselves.

Trainer connections: a coordinator's trainers, the work that each takes, and the news that all of them receive.
"""

from __future__ import annotations

import itertools
import logging
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, replace

from swarmnode import tolerances
from swarmnode.codec.body import Body, HopSpec
from swarmnode.codec.frames import FrameKind
from swarmnode.codec.training_messages import (
    LARGEST_LOSS,
    Done,
    Failed,
    Lease,
    ProgressReport,
    Release,
    StepReport,
    Stopped,
)
from swarmnode.errors import ErrorCode
from swarmnode.links.switchboard import Channel
from swarmnode.net.fair_share import Recent
from swarmnode.net.interfaces import PeerId
from swarmnode.plan.training.step_forecast import passing_s
from swarmnode.plan.training.step_ledger import OutstandingLease, StepLedger
from swarmnode.plan.training.wiring import Replica, Transfers, Wire, book, set_at_once, wire
from swarmnode.swarm.records.run import Run
from swarmnode.training.coordinator.link_times import AnswerTimes, FailedAttempts, Failures, LinkTimes
from swarmnode.training.coordinator.worker_group import WorkerHandle, WorkerState
from swarmnode.training.worker.admission import seal_lease

HISTORY_STEPS = 1024


@dataclass(eq=False)
class TrainerLine:
    """A trainer at work: the run that it feeds, and the number of microbatches that it takes at a time."""

    channel: Channel
    run: Run
    want: int

    @property
    def peer(self) -> PeerId:
        """Id of the trainer's peer."""
        return self.channel.peer

    def send(self, body: Body) -> None:
        """Send a message to the trainer. Does nothing if the link is cut: its loss is about to be noticed."""
        if self.channel.open:
            self.channel.send(body)


class TrainerConnections:
    """The connected trainers and the news of the run: a trainer that joins later receives the steps that it has missed."""

    def __init__(self) -> None:
        self.stopped: Stopped | None = None
        self.history: deque[StepReport] = deque(maxlen=HISTORY_STEPS)
        self._lines: dict[Channel, TrainerLine] = {}

    def __iter__(self) -> Iterator[TrainerLine]:
        return iter(list(self._lines.values()))

    def add(self, line: TrainerLine, since: int) -> None:
        """Add a trainer. Send it the kept reports of the steps from `since` on, and the end of the run if it has ended."""
        self._lines[line.channel] = line
        for report in self.history:
            if report.step >= since:
                line.send(report)
        if self.stopped is not None:
            line.send(self.stopped)

    def of(self, peer: PeerId) -> TrainerLine | None:
        """Return the connection of `peer`, or None if it is no trainer."""
        return next((line for line in self if line.peer == peer), None)

    def remove(self, channel: Channel) -> bool:
        """Remove a trainer. Returns False if it was not connected."""
        return self._lines.pop(channel, None) is not None

    def tell(self, news: StepReport | Stopped | ProgressReport) -> None:
        """Send news to all trainers. Step reports and the end of the run are kept for trainers that come later."""
        if isinstance(news, Stopped):
            self.stopped = news
        elif isinstance(news, StepReport):
            self.history.append(news)
        for line in self:
            line.send(news)

    def begin_anew(self) -> None:
        """Forget the reports and the end of the last run."""
        self.history.clear()
        self.stopped = None


log = logging.getLogger(__name__)

LEASE_BITS = 22  # leases of one term
NEWCOMERS = "newcomers"  # all trainers that have fed nothing yet, as one name in `Failures`
MAX_PROVEN = 1024


@dataclass(eq=False)
class Dispatcher:
    """Dispatcher of the leases of the `ledger` of the current step. `members` and `trainer_connections` belong to the
    coordinator and are read at every decision."""

    units: int
    members: Mapping[PeerId, WorkerHandle]
    trainer_connections: TrainerConnections
    failures: Failures
    link_times: LinkTimes
    _: KW_ONLY
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self.ledger = StepLedger(0, self.units, range(0))
        self.term = 0
        self.key = b""  # of the term's seals
        self.failed_attempts = FailedAttempts()
        self._run = b""  # the id of the run in force
        self._positions = 0  # of one of its microbatches
        self._transfers = Transfers()
        self._proven: Recent[PeerId, None] = Recent(MAX_PROVEN)  # trainers that have fed something
        self._links_key: tuple[int, frozenset[PeerId]] | None = None  # step and stages of the last look-up of links
        self._numbers = itertools.count()
        self._times = AnswerTimes()

    def __repr__(self) -> str:
        return f"<Dispatcher of term {self.term}, {self.ledger!r}>"

    def begin(self, run: Run, ledger: StepLedger) -> None:
        """Lease microbatches of `run` and of the ledger's step from now on."""
        if (run.id, ledger.step) != (self._run, self.ledger.step):  # repeating a step keeps the failures
            self.failed_attempts = FailedAttempts()
        self._run, self._positions, self.ledger = run.id, run.positions, ledger

    # -- leasing

    def dispatch(self) -> None:
        """Lease every microbatch that is free, as long as trainers and stages have room. Peers that are backing off get none."""
        ledger = self.ledger
        usable = [member for member in self.members.values() if member.state is WorkerState.USABLE]
        workers = {member.peer: member.worker for member in usable if not self.failures.rests(member.peer)}
        self._know_links(ledger.step, workers)
        free = ledger.free()
        for dispatched, number in enumerate(free):
            # The trainer with the most room for another microbatch, or None if all are full or in a pause. If a trainer has
            # fed something, all trainers that have not share a single microbatch, and a pause after a failure: a stranger
            # could invent any number of them.
            load = {line: len(self.ledger.held_by(line.peer)) / line.want for line in self.trainer_connections}
            able = [line for line in load if load[line] < 1 and not self.failures.rests(line.peer)]
            if any(line.peer in self._proven for line in load) and not self._tries_newcomers():
                able = [line for line in able if line.peer in self._proven]
            trainer = min(able, key=lambda line: load[line], default=None)
            if trainer is None:
                return
            counters, left = ledger.counters(number), len(free) - dispatched
            route = wire(workers, counters, self._transfers, left=left)
            if route is not None:
                self._give(trainer, number, tuple(route))
            elif not any(counters):
                return  # else only this microbatch waits for a certain peer

    def separate(self, accuser: PeerId, accused: PeerId) -> None:
        """Route no microbatch from one of these stages to the other, unless there is no other route."""
        if accused in self.members and self._transfers.separate(accuser, accused):
            log.warning("stage %s finds that %s may send false data: they are kept apart", accuser, accused)

    def forget_separations(self) -> None:
        """Let stages meet that are kept apart: the run is over, and what it found may be the data's or the settings' fault."""
        self._transfers.forget_separations()

    def passing_s(self, step: int, microbatches: int) -> float:
        """Estimate the seconds that `microbatches` take if nothing else runs. Returns 0 if no stage has been measured or a layer
        has no holder. A stage without measurements counts as fast as the median."""
        members = (member for member in self.members.values() if member.state is WorkerState.USABLE)
        workers = {member.peer: member.worker for member in members}
        measured_s = [worker.unit_s for worker in workers.values() if worker.unit_s]
        if not measured_s:
            return 0.0
        self._know_links(step, workers)
        usual_s = statistics.median(measured_s)
        likely = {peer: replace(worker, unit_s=worker.unit_s or usual_s) for peer, worker in workers.items()}
        return passing_s(self.units, likely, self._transfers, microbatches)

    def _know_links(self, step: int, workers: Mapping[PeerId, Replica]) -> None:
        """Look up the links, and how many microbatches keep each stage busy, if the step or the stages have changed."""
        known = step, frozenset(workers)
        if known != self._links_key:
            self._links_key, peers = known, sorted(workers)
            between = self.link_times.between(peers, self._positions)
            self._transfers.know(peers, *between, self.link_times.homes(peers))
            set_at_once(self.units, workers, self._transfers)

    def hopeless_unit(self) -> int | None:
        """Return the first layer whose usable stages have all failed ATTEMPTS times at a microbatch, since their last success,
        or at the all-reduce; None if there is none. For failures at microbatches each connected trainer that has fed
        something must have reported some."""
        usable = [member for member in self.members.values() if member.state is WorkerState.USABLE]
        holders = [
            {member.peer for member in usable if member.span.start <= unit < member.span.end}
            for unit in range(self.units)
        ]
        proven = {line.peer for line in self.trainer_connections if line.peer in self._proven}
        return self.failed_attempts.hopeless_unit(holders, proven)

    def _tries_newcomers(self) -> bool:
        tried = any(record.trainer not in self._proven for record in self.ledger.out)
        return not tried and not self.failures.rests(NEWCOMERS)

    def _give(self, trainer: TrainerLine, number: int, route: tuple[Wire, ...]) -> None:
        lease, now_s, step = (self.term << LEASE_BITS) + next(self._numbers), self.clock(), self.ledger.step
        within_s = self._times.wait_s(FrameKind.LEASE, work_s=self._work_s(route))
        record = OutstandingLease(lease, number, route, trainer.peer, now_s, now_s + within_s)
        self.ledger.grant(record)
        self._book(record, 1)
        hops = tuple(HopSpec(peer, span.start, span.end) for peer, span in route)
        seal = seal_lease(self.key, self._run, self.term, lease, step, number, hops, trainer.peer)
        trainer.send(Lease(self.term, lease, step, number, hops, self._run, within_s, seal))

    def _work_s(self, route: tuple[Wire, ...]) -> float:
        """Estimate the seconds of computing along the route, including microbatches booked before; 0 if a stage has not
        been measured."""
        workers = [(self.members[peer].worker, span) for peer, span in route if peer in self.members]
        if not all(worker.unit_s for worker, _ in workers):
            return 0.0
        return sum(worker.finish_s(span.units) for worker, span in workers)

    def _book(self, record: OutstandingLease, sign: int) -> None:
        workers = {peer: self.members[peer].worker for peer, _ in record.route if peer in self.members}
        book(record.route, workers, self._transfers, sign)

    # -- results

    def done(self, trainer: TrainerLine, body: Done) -> None:
        """Count a microbatch that the trainer reports as done.

        Does nothing if its lease was called back before (the stages have reported their counts) or is another trainer's.
        Calls the lease back if the loss is not finite, which no stage would have let pass.
        """
        record = self.ledger.find(body.lease, trainer.peer)
        if record is None:
            return
        if not abs(body.loss) <= LARGEST_LOSS:
            self._call_back(record, frozenset({trainer.peer}))
            return
        self.ledger.done(record, body.loss, body.expert_load)
        self.failed_attempts.forget(record.number, {peer for peer, _ in record.route})
        self._book(record, -1)
        self._times.record(FrameKind.LEASE, self.clock() - record.issued_at_s)
        if trainer.peer not in self._proven:
            self.failures.forgive(NEWCOMERS)
            self._proven[trainer.peer] = None
        for peer in (trainer.peer, *(peer for peer, _ in record.route)):
            self.failures.forgive(peer)

    def failed(self, trainer: TrainerLine, failed: Failed) -> None:
        """Take back a microbatch that the trainer gave up, so that it is computed again on another route.

        Suspected of the failure are the stage that the trainer names and the hop before it; only the trainer if it names no stage
        of the route or misses labels.
        """
        record = self.ledger.find(failed.lease, trainer.peer)
        if record is None:
            return
        log.info("microbatch %d failed at %s: code %d", record.number, failed.peer or "its trainer", failed.code)
        hops = [trainer.peer, *(peer for peer, _ in record.route)]
        is_stage = failed.peer in hops[1:] and failed.code != ErrorCode.NOT_FOUND  # labels are the trainer's to send
        place = hops.index(failed.peer) if is_stage else 0
        if is_stage:  # for NaN, the stage's claim decides if there is one (`step_loop.py`)
            record.failed_at, record.code = failed.peer, failed.code
        self._call_back(record, frozenset(hops[max(0, place - 1) : place + 1]))

    def expire(self) -> None:
        """Call back the leases that are past their deadlines."""
        now_s = self.clock()
        late = [record for record in self.ledger.out if now_s > record.until_s]
        for record in late:
            log.warning("microbatch %d is late by its deadline of %.1f s", record.number, now_s - record.issued_at_s)
            self._call_back(record)
        if late:
            self._times.stretch(FrameKind.LEASE)

    def _call_back(self, record: OutstandingLease, suspects: frozenset[PeerId] | None = None) -> None:
        """Release a lease: trainer and stages forget it, and the stages report their counts."""
        self._book(record, -1)
        members = {peer: self.members[peer] for peer, _ in record.route if peer in self.members}
        release = Release((record.lease,), self._run)
        for trainer in self.trainer_connections:
            if trainer.peer == record.trainer:
                trainer.send(release)
        self.ledger.call_back(record, members, suspects)
        for member in members.values():
            member.command(release)

    def blame(self, record: OutstandingLease) -> frozenset[PeerId]:
        """Strike the peers that may have made a lease fail, after all its stages have reported their counts, and return them.

        Returns none if a stage has met NaN in it: they are struck already. If no stage has counted it, all stages of the route are
        suspects, and the trainer; a trainer that has fed nothing yet is the only suspect if others have.
        """
        if record.claimed:
            return frozenset()
        suspects = self.ledger.around_the_gap(record) if record.suspects is None else record.suspects
        if record.suspects is None and not suspects:
            is_stranger = bool(self._proven) and record.trainer not in self._proven
            suspects = frozenset({record.trainer, *(() if is_stranger else (peer for peer, _ in record.route))})
        if record.failed_at and not self.failures.rests(record.failed_at):  # else it is the same failure
            self.failed_attempts.record(record.number, record.failed_at, record.code, record.trainer)
        for peer in suspects:
            self.record_failure(peer, is_trainer=peer == record.trainer)
        return suspects

    def record_failure(self, peer: PeerId, *, is_trainer: bool = False) -> None:
        """Leave a peer alone for a while. A trainer that fails FAILURES times in a row is no longer proven."""
        self.failures.record(peer)
        if is_trainer and peer not in self._proven:
            self.failures.record(NEWCOMERS)
        elif is_trainer and self.failures.in_a_row(peer) >= tolerances.FAILURES:
            self._proven.pop(peer, None)

    def lose(self, peer: PeerId) -> None:
        """Forget the lost stage of `peer` with its counts, and call back the leases whose route includes it."""
        for record in self.ledger.leases:
            if record.called_back:
                if record.passes(peer):
                    record.suspects = frozenset()  # the lost stage is the reason
                self.ledger.released(record.lease, peer)
            elif record.passes(peer):
                self._call_back(record, frozenset())
        self.ledger.lose(peer)

    def lose_trainer(self, trainer: TrainerLine) -> None:
        """Call back the microbatches leased to a trainer that was lost."""
        for record in self.ledger.held_by(trainer.peer):
            self._call_back(record, frozenset())

    def clear(self) -> None:
        """Forget all leases, all booked transfers, and the microbatches booked at the members."""
        self.ledger.void()
        self._transfers.clear()
        for member in self.members.values():
            member.worker.booked_units = member.worker.in_flight = 0
