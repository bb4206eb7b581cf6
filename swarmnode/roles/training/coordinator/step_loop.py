"""Step loop: the steps of one run, from one rendezvous to the next.

    stepping     leases out, counts in
    reducing     replicas agree on gradients; any loss leads back to stepping
    over         all steps done, or the loss is not finite
    broken       units have nobody any more, or a stage did not get where it should: roll must be called again

What a step loop knows is what stages and trainers told it. Nothing here waits: each word changes what is known, and `go_on`
decides what follows from it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from enum import Enum

from swarmnode.codec.frames import FrameKind
from swarmnode.codec.messages import Body
from swarmnode.codec.training_messages import Commit, Condition, Discard, Failed, Reduced, Status, StepReport, Stopped
from swarmnode.errors import ErrorCode
from swarmnode.net.interfaces import PeerId
from swarmnode.plan.training.groups import Holder, make_groups
from swarmnode.plan.training.recovery import RecoveryPlan
from swarmnode.plan.training.step_ledger import StepLedger
from swarmnode.roles.training.coordinator.all_reduce_attempt import AllReduceAttempt
from swarmnode.roles.training.coordinator.dispatcher import Dispatcher
from swarmnode.roles.training.coordinator.leases import OutstandingLease
from swarmnode.roles.training.coordinator.step_progress import StepProgress
from swarmnode.roles.training.coordinator.trainer_connections import TrainerConnections
from swarmnode.roles.training.coordinator.worker_group import WorkerGroup
from swarmnode.roles.training.coordinator.worker_handle import WorkerHandle, WorkerState
from swarmnode.swarm.records.run import Run, encode_run

log = logging.getLogger(__name__)


class Phase(Enum):
    STEPPING = "stepping"
    REDUCING = "reducing"
    OVER = "over"
    BROKEN = "broken"


class StepLoop:
    """`run` from `step` on. `attempts` numbers the all-reduces of all step loops of a coordinator; `clock` in seconds."""

    def __init__(
        self,
        run: Run,
        step: int,
        units: int,
        worker_group: WorkerGroup,
        dispatcher: Dispatcher,
        trainer_connections: TrainerConnections,
        *,
        attempts: Iterator[int],
        clock: Callable[[], float],
    ) -> None:
        self.run = run
        self.step = step
        self.phase = Phase.STEPPING
        self._raw_run = encode_run(run)
        self._units = units
        self._worker_group = worker_group
        self._dispatcher = dispatcher
        self._trainer_connections = trainer_connections
        self._attempts = attempts
        self._clock = clock
        self._step_progress = self._new_step_progress()
        self._all_reduce: AllReduceAttempt | None = None

    def __repr__(self) -> str:
        return f"<StepLoop {self.phase.value} at step {self.step} of {self.run.steps}>"

    def _new_step_progress(self) -> StepProgress:
        return StepProgress(StepLedger(self.step, self._units, self.run.microbatches), self._clock())

    # -- to the first step

    def begin(self) -> None:
        """Everybody to step 0, with the parameters that the last run led to."""
        behind = [
            member for member in self._worker_group if member.state not in (WorkerState.USABLE, WorkerState.ASKED)
        ]
        for member in self._worker_group.usable():
            member.begin(self._raw_run)
        for member in behind:
            self._sync(member)

    def gather(self, found: RecoveryPlan) -> None:
        """Everybody to the step that a rendezvous found."""
        told = next((self._worker_group.members[peer].status for peer in found.stay), None)
        for peer in found.stay | found.commit | found.restore:
            member = self._worker_group.members[peer]
            if peer in found.commit:
                assert told is not None  # nobody commits without one who has
                member.state = WorkerState.COMING
                member.send(Commit(found.step - 1, told.norm, told.loss))
            elif peer in found.restore:
                member.restore(self._raw_run, found.step)
            elif member.status is not None and self._is_here(member.status):
                member.state = WorkerState.USABLE
                self._step_progress.take(member, member.status)
            else:
                member.begin(self._raw_run)
        for peer in found.sync:
            self._sync(self._worker_group.members[peer])
        if (
            told is not None and self.step > 0 and not self._trainer_connections.history
        ):  # it may have died before it could tell
            self._trainer_connections.tell(StepReport(self.step - 1, told.loss, 0.0, told.norm, len(found.stay)))
        self._end_if_done()

    def _is_here(self, status: Status) -> bool:
        """Whether a stage is ready for the step in force."""
        return status.condition == Condition.READY and status.step == self.step and status.run == self._raw_run

    def _sync(self, member: WorkerHandle) -> None:
        """Let a stage that is behind hear the all-reduces from now on, and fetch the state from its replicas."""
        holders = tuple(other.peer for other in self._worker_group.usable() if other.span.overlaps(member.span))
        member.sync(self._raw_run, self.step + (self.phase is Phase.REDUCING), holders)

    # -- what is told

    def _admit(self, member: WorkerHandle, status: Status) -> None:
        """A stage has come in the middle of a run and said what it holds."""
        if self._is_here(status):
            member.state = WorkerState.USABLE
            self._step_progress.take(member, status)
        elif status.condition == Condition.BLANK and self.step == 0 and not self._trainer_connections.history:
            member.begin(self._raw_run)
        else:
            self._sync(member)

    def hear(self, member: WorkerHandle, body: Body) -> None:
        """A stage says something; what it says of itself the member has heard, but for answers to RELEASE."""
        if isinstance(body, Status):
            self._hear_status(member, body)
        elif isinstance(body, Reduced):
            self._hear_reduced(member.peer, body)
        elif isinstance(body, Failed):
            self._hear_failed(body)

    def _hear_status(self, member: WorkerHandle, status: Status) -> None:
        if status.answers == FrameKind.RELEASE:
            if member.state is WorkerState.USABLE and self._is_here(status):
                member.hear(status)
                self._step_progress.add(member, status)
        elif member.state is WorkerState.ASKED:
            self._admit(member, status)
        elif member.state is WorkerState.DISCARDING and status.answers != FrameKind.DISCARD:
            return  # told before it heard of that
        elif self._is_here(status):
            if member.state is not WorkerState.USABLE:
                member.state = WorkerState.USABLE
                self._step_progress.enter([member])
            if status.answers == FrameKind.DISCARD:
                self._step_progress.take(member, status)
        elif status.answers in (FrameKind.BEGIN, FrameKind.RESTORE):
            log.warning("stage %s could not come to step %d", member.peer, self.step)
            self.phase = Phase.BROKEN
        elif status.answers == FrameKind.COMMIT or (
            status.answers == FrameKind.SYNC and status.condition != Condition.READY
        ):
            self._sync(member)  # it came too late for an all-reduce, or did not get a state

    def _hear_reduced(self, peer: PeerId, body: Reduced) -> None:
        if self.phase is Phase.REDUCING and self._all_reduce is not None:
            self._all_reduce.hear(peer, body)
            if self._all_reduce.over:
                self._commit(self._all_reduce.norm())

    def _hear_failed(self, body: Failed) -> None:
        """A stage met NaN, or it could not reduce since a member is lost, which its own line will tell."""
        if body.code == ErrorCode.NOT_FINITE:
            self._stop(Stopped(self.step, body.code, body.unit))
        elif self.phase is Phase.REDUCING and self._all_reduce is not None and body.lease == self._all_reduce.attempt:
            self.phase = Phase.STEPPING

    def lose(self, peer: PeerId) -> None:
        """A stage is gone with what it had counted."""
        self._step_progress.ledger.lose(peer)
        if self.phase is Phase.REDUCING and self._all_reduce is not None and self._all_reduce.needs(peer):
            self.phase = Phase.STEPPING

    def count(self, grant: OutstandingLease, loss: float) -> None:
        """A trainer has a microbatch back."""
        self._step_progress.count(grant, loss)

    # -- what follows

    def go_on(self) -> None:
        """Within a step: nobody missing, nothing twice, the rest leased, and then the all-reduce."""
        if self.phase is not Phase.STEPPING:
            return
        if self._worker_group.uncovered(self._units):
            self.phase = Phase.BROKEN
            return
        ledger = self._step_progress.ledger
        for peer in ledger.conflicts():
            ledger.lose(peer)
            self._worker_group.members[peer].discard()
        self._dispatcher.dispatch(ledger)
        if ledger.complete() and not len(self._dispatcher.outstanding_leases):
            self._reduce()

    def _reduce(self) -> None:
        """Everything is counted once: let the replicas of each unit agree, listeners hearing."""
        hearing = self._worker_group.hearing(self.step)
        holders = [Holder(member.peer, member.span, member.state is WorkerState.LISTENING) for member in hearing]
        groups = make_groups(self._units, self.run, self.step, holders, self._step_progress.ledger.counts)
        self._all_reduce = AllReduceAttempt(
            self.step, next(self._attempts), groups, [member.peer for member in hearing]
        )
        self.phase = Phase.REDUCING
        for member in hearing:
            member.send(self._all_reduce.request(member.peer))

    def _commit(self, norm: float) -> None:
        """The word that ends the step. Each square that led to the norm is finite, as their messages are."""
        usable, loss = self._worker_group.usable(), self._step_progress.loss
        beat_s = max((member.span.units * member.worker.unit_s for member in usable), default=0.0)
        for member in self._worker_group.hearing(self.step):
            member.send(Commit(self.step, norm, loss, beat_s))
        step_s = self._clock() - self._step_progress.began_at_s
        self._trainer_connections.tell(StepReport(self.step, loss, step_s, norm, len(usable)))
        self.step += 1
        self.phase = Phase.STEPPING
        self._step_progress = self._new_step_progress()
        self._step_progress.enter(usable)
        self._end_if_done()

    def _end_if_done(self) -> None:
        if self.step >= self.run.steps:
            self._stop(Stopped(self.step))

    def _stop(self, stopped: Stopped) -> None:
        """The run is over, or cannot go on: the last good step stays."""
        if self.phase is Phase.OVER:
            return
        self.phase = Phase.OVER
        self._dispatcher.clear()
        if stopped.code:
            for member in self._worker_group.usable():
                member.send(Discard())
        self._trainer_connections.tell(stopped)
