"""Course: the steps of one run, from one roll call to the next.

    stepping     leases out, counts in
    reducing     replicas agree on gradients; any loss leads back to stepping
    over         all steps done, or the loss is not finite
    broken       units have nobody any more, or a stage did not get where it should: roll must be called again

What a course knows is what stages and trainers told it. Nothing here waits: each word changes what is known, and `go_on`
decides what follows from it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from enum import Enum

from swarmnode.codec.frames import Kind
from swarmnode.codec.messages import Body
from swarmnode.codec.training_messages import Commit, Condition, Discard, Failed, Reduced, Status, StepReport, Stopped
from swarmnode.errors import ErrorCode
from swarmnode.net.interfaces import PeerId
from swarmnode.plan.groups import Holder, make_groups
from swarmnode.plan.ledger import Ledger
from swarmnode.plan.muster import Muster
from swarmnode.roles.training.audience import Audience
from swarmnode.roles.training.dispatcher import Dispatcher
from swarmnode.roles.training.ensemble import Ensemble
from swarmnode.roles.training.grants import Grant
from swarmnode.roles.training.member import Member, Standing
from swarmnode.roles.training.reduction import Reduction
from swarmnode.roles.training.tally import Tally
from swarmnode.swarm.run import Run, encode_run

log = logging.getLogger(__name__)


class Phase(Enum):
    STEPPING = "stepping"
    REDUCING = "reducing"
    OVER = "over"
    BROKEN = "broken"


class Course:
    """`run` from `step` on. `attempts` numbers the reductions of all courses of a conductor; `clock` in seconds."""

    def __init__(
        self,
        run: Run,
        step: int,
        units: int,
        ensemble: Ensemble,
        dispatcher: Dispatcher,
        audience: Audience,
        *,
        attempts: Iterator[int],
        clock: Callable[[], float],
    ) -> None:
        self.run = run
        self.step = step
        self.phase = Phase.STEPPING
        self._raw_run = encode_run(run)
        self._units = units
        self._ensemble = ensemble
        self._dispatcher = dispatcher
        self._audience = audience
        self._attempts = attempts
        self._clock = clock
        self._tally = self._new_tally()
        self._reduction: Reduction | None = None

    def __repr__(self) -> str:
        return f"<Course {self.phase.value} at step {self.step} of {self.run.steps}>"

    def _new_tally(self) -> Tally:
        return Tally(Ledger(self.step, self._units, self.run.microbatches), self._clock())

    # -- to the first step

    def begin(self) -> None:
        """Everybody to step 0, with the parameters that the last run led to."""
        behind = [member for member in self._ensemble if member.standing not in (Standing.USABLE, Standing.ASKED)]
        for member in self._ensemble.usable():
            member.begin(self._raw_run)
        for member in behind:
            self._sync(member)

    def gather(self, found: Muster) -> None:
        """Everybody to the step that a roll call found."""
        told = next((self._ensemble.members[peer].status for peer in found.stay), None)
        for peer in found.stay | found.commit | found.restore:
            member = self._ensemble.members[peer]
            if peer in found.commit:
                assert told is not None  # nobody commits without one who has
                member.standing = Standing.COMING
                member.send(Commit(found.step - 1, told.norm, told.loss))
            elif peer in found.restore:
                member.restore(self._raw_run, found.step)
            elif member.status is not None and self._is_here(member.status):
                member.standing = Standing.USABLE
                self._tally.take(member, member.status)
            else:
                member.begin(self._raw_run)
        for peer in found.sync:
            self._sync(self._ensemble.members[peer])
        if told is not None and self.step > 0 and not self._audience.history:  # it may have died before it could tell
            self._audience.tell(StepReport(self.step - 1, told.loss, 0.0, told.norm, len(found.stay)))
        self._end_if_done()

    def _is_here(self, status: Status) -> bool:
        """Whether a stage is ready for the step in force."""
        return status.condition == Condition.READY and status.step == self.step and status.run == self._raw_run

    def _sync(self, member: Member) -> None:
        """Let a stage that is behind hear the reductions from now on, and fetch the state from its replicas."""
        holders = tuple(other.peer for other in self._ensemble.usable() if other.span.overlaps(member.span))
        member.sync(self._raw_run, self.step + (self.phase is Phase.REDUCING), holders)

    # -- what is told

    def _admit(self, member: Member, status: Status) -> None:
        """A stage has come in the middle of a run and said what it holds."""
        if self._is_here(status):
            member.standing = Standing.USABLE
            self._tally.take(member, status)
        elif status.condition == Condition.BLANK and self.step == 0 and not self._audience.history:
            member.begin(self._raw_run)
        else:
            self._sync(member)

    def hear(self, member: Member, body: Body) -> None:
        """A stage says something; what it says of itself the member has heard, but for answers to RELEASE."""
        if isinstance(body, Status):
            self._hear_status(member, body)
        elif isinstance(body, Reduced):
            self._hear_reduced(member.peer, body)
        elif isinstance(body, Failed):
            self._hear_failed(body)

    def _hear_status(self, member: Member, status: Status) -> None:
        if status.answers == Kind.RELEASE:
            if member.standing is Standing.USABLE and self._is_here(status):
                member.hear(status)
                self._tally.add(member, status)
        elif member.standing is Standing.ASKED:
            self._admit(member, status)
        elif member.standing is Standing.DISCARDING and status.answers != Kind.DISCARD:
            return  # told before it heard of that
        elif self._is_here(status):
            if member.standing is not Standing.USABLE:
                member.standing = Standing.USABLE
                self._tally.enter([member])
            if status.answers == Kind.DISCARD:
                self._tally.take(member, status)
        elif status.answers in (Kind.BEGIN, Kind.RESTORE):
            log.warning("stage %s could not come to step %d", member.peer, self.step)
            self.phase = Phase.BROKEN
        elif status.answers == Kind.COMMIT or (status.answers == Kind.SYNC and status.condition != Condition.READY):
            self._sync(member)  # it came too late for a reduction, or did not get a state

    def _hear_reduced(self, peer: PeerId, body: Reduced) -> None:
        if self.phase is Phase.REDUCING and self._reduction is not None:
            self._reduction.hear(peer, body)
            if self._reduction.over:
                self._commit(self._reduction.norm())

    def _hear_failed(self, body: Failed) -> None:
        """A stage met NaN, or it could not reduce since a member is lost, which its own line will tell."""
        if body.code == ErrorCode.NOT_FINITE:
            self._stop(Stopped(self.step, body.code, body.unit))
        elif self.phase is Phase.REDUCING and self._reduction is not None and body.lease == self._reduction.attempt:
            self.phase = Phase.STEPPING

    def lose(self, peer: PeerId) -> None:
        """A stage is gone with what it had counted."""
        self._tally.ledger.lose(peer)
        if self.phase is Phase.REDUCING and self._reduction is not None and self._reduction.needs(peer):
            self.phase = Phase.STEPPING

    def count(self, grant: Grant, loss: float) -> None:
        """A trainer has a microbatch back."""
        self._tally.count(grant, loss)

    # -- what follows

    def go_on(self) -> None:
        """Within a step: nobody missing, nothing twice, the rest leased, and then the reduction."""
        if self.phase is not Phase.STEPPING:
            return
        if self._ensemble.uncovered(self._units):
            self.phase = Phase.BROKEN
            return
        ledger = self._tally.ledger
        for peer in ledger.conflicts():
            ledger.lose(peer)
            self._ensemble.members[peer].discard()
        self._dispatcher.dispatch(ledger)
        if ledger.complete() and not len(self._dispatcher.grants):
            self._reduce()

    def _reduce(self) -> None:
        """Everything is counted once: let the replicas of each unit agree, listeners hearing."""
        hearing = self._ensemble.hearing(self.step)
        holders = [Holder(member.peer, member.span, member.standing is Standing.LISTENING) for member in hearing]
        groups = make_groups(self._units, self.run, self.step, holders, self._tally.ledger.counts)
        self._reduction = Reduction(self.step, next(self._attempts), groups, [member.peer for member in hearing])
        self.phase = Phase.REDUCING
        for member in hearing:
            member.send(self._reduction.request(member.peer))

    def _commit(self, norm: float) -> None:
        """The word that ends the step. Each square that led to the norm is finite, as their messages are."""
        usable, loss = self._ensemble.usable(), self._tally.loss
        beat_s = max((member.span.units * member.worker.unit_s for member in usable), default=0.0)
        for member in self._ensemble.hearing(self.step):
            member.send(Commit(self.step, norm, loss, beat_s))
        step_s = self._clock() - self._tally.began_at_s
        self._audience.tell(StepReport(self.step, loss, step_s, norm, len(usable)))
        self.step += 1
        self.phase = Phase.STEPPING
        self._tally = self._new_tally()
        self._tally.enter(usable)
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
            for member in self._ensemble.usable():
                member.send(Discard())
        self._audience.tell(stopped)
