"""Conductor: shares out a step's microbatches, sees that each is counted once, and gives the word to reduce and commit.

Any ready node can conduct, the eldest does. What a conductor knows is what the stages and trainers told it, so when it is
lost the next one asks again and goes on. A term numbers the conductors: stages follow the highest that they heard.

    mustering    asking who holds what; where units are missing, waiting
    stepping     leases out, counts in
    reducing     replicas agree on gradients; any loss leads back to stepping
    over         all steps done, or the loss is not finite

Every event changes what is known and then calls `_advance`, which decides what follows; nothing here waits in between.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable
from enum import Enum

from swarmnode.codec.frames import Frame, Kind
from swarmnode.codec.messages import Body, End, Error
from swarmnode.codec.training_messages import (
    Begin,
    Commit,
    Condition,
    Conduct,
    Discard,
    Done,
    Failed,
    Reduced,
    Restore,
    Status,
    StepReport,
    Stopped,
    Sync,
    Work,
)
from swarmnode.errors import ErrorCode, PeerError, ProtocolError, SwarmnodeError
from swarmnode.net.interfaces import PeerId
from swarmnode.net.switchboard import Channel
from swarmnode.net.tasks import Tasks
from swarmnode.plan.groups import Holder, make_groups
from swarmnode.plan.ledger import Ledger
from swarmnode.plan.muster import Muster, muster
from swarmnode.roles.training.audience import Audience, TrainerLine
from swarmnode.roles.training.dispatcher import Dispatcher
from swarmnode.roles.training.member import Line, Member, Standing
from swarmnode.roles.training.reduction import Reduction
from swarmnode.roles.training.status import masks_of
from swarmnode.swarm.run import Run, decode_run, encode_run

log = logging.getLogger(__name__)

ROLL_BACK_AFTER_S = 3.0  # units are missing that long before steps on disk count: a peer may only have been slow
LOOK_S = 1.0
TERM_BITS = 16  # of a term that tell conductors apart

Dial = Callable[[PeerId, Callable[[Frame, Body], None], Callable[[PeerError], None]], Awaitable[Line]]


class Phase(Enum):
    MUSTERING = "mustering"
    STEPPING = "stepping"
    REDUCING = "reducing"
    OVER = "over"


class Conductor:
    """A peer's time in office, with a new term for each muster. `dial` opens a conversation with a stage; `resigned` is
    called where a higher term was heard of."""

    def __init__(
        self,
        term: int,
        units: int,
        dial: Dial,
        *,
        resigned: Callable[[int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.term = term
        self.run: Run | None = None
        self.step = 0
        self.phase = Phase.MUSTERING
        self._units = units
        self._dial = dial
        self._resigned = resigned
        self._clock = clock
        self._members: dict[PeerId, Member] = {}
        self._dialing: set[PeerId] = set()
        self._audience = Audience()
        self._dispatcher = Dispatcher(term, units, self._members, self._audience)
        self._ledger = Ledger(0, units, 0)
        self._losses: dict[int, float] = {}
        self._attempts = itertools.count()
        self._reduction: Reduction | None = None
        self._began_at_s = clock()  # of the step
        self._missing_since_s: float | None = None
        self._missing: tuple[int, ...] = ()
        self._tasks = Tasks("conductor")

    def __repr__(self) -> str:
        return f"<Conductor of term {self.term} {self.phase.value} at step {self.step}, {len(self._members)} stages>"

    def start(self) -> None:
        """Begin to watch the clock."""
        self._tasks.spawn(self._tick(), "clock")

    async def close(self) -> None:
        """Let go of everybody; the next conductor will ask them."""
        await self._tasks.close()
        for line in [*(member.line for member in self._members.values()), *(line.channel for line in self._audience)]:
            line.close()

    async def _tick(self) -> None:
        """What only time brings about: steps on disk that begin to count, and news for those who wait."""
        while True:
            await asyncio.sleep(LOOK_S)
            if self._missing:
                self._audience.tell(StepReport(self.step, missing=self._missing))
            self._advance()

    # -- stages come and go

    def enlist(self, peers: Iterable[PeerId]) -> None:
        """These stages are there: speak to those that are new."""
        for peer in peers:
            if peer not in self._members and peer not in self._dialing:
                self._dialing.add(peer)
                self._tasks.spawn(self._call(peer), f"call {peer}")

    async def _call(self, peer: PeerId) -> None:
        try:
            line = await self._dial(
                peer, lambda _frame, body: self._hear(peer, body), lambda error: self._lose(peer, error)
            )
        except SwarmnodeError as error:
            log.info("stage %s cannot be reached: %s", peer, error)
            return
        finally:
            self._dialing.discard(peer)
        member = self._members[peer] = Member(peer, line)
        member.send(Conduct(self.term))

    def _lose(self, peer: PeerId, error: PeerError | None = None) -> None:
        """A stage is gone with what it had counted."""
        member = self._members.pop(peer, None)
        if member is None:
            return
        log.info("stage %s is lost: %s", peer, error or "it let go")
        member.line.close()
        self._ledger.lose(peer)
        self._dispatcher.lose(peer)
        if self.phase is Phase.REDUCING and self._reduction is not None and self._reduction.needs(peer):
            self.phase = Phase.STEPPING
        self._advance()

    def _hear(self, peer: PeerId, body: Body) -> None:
        member = self._members.get(peer)
        if member is None:
            return
        if isinstance(body, Status):
            self._hear_status(member, body)
        elif isinstance(body, Reduced):
            self._hear_reduced(peer, body)
        elif isinstance(body, Failed):
            self._hear_failed(body)
        elif isinstance(body, End | Error):
            self._lose(peer)
        self._advance()

    def _hear_status(self, member: Member, status: Status) -> None:
        if status.term > self.term:
            self._resigned(status.term)
            return
        if status.answers == Kind.RELEASE:
            self._hear_released(member, status)
            return
        first = member.status is None
        if first and status.answers != Kind.CONDUCT:
            return  # told before it heard our CONDUCT: it may have counted more since
        member.hear(status)
        if first:
            self._admit(member)
        elif member.standing is Standing.DISCARDING and status.answers != Kind.DISCARD:
            return  # told before it heard of that
        elif self._is_here(status):
            if member.standing is not Standing.USABLE:
                member.standing = Standing.USABLE
                self._ledger.report(member.peer, member.span, {})
            if status.answers == Kind.DISCARD:
                self._take_counts(member, status, keep=False)
        elif status.answers in (Kind.BEGIN, Kind.RESTORE):
            log.warning("stage %s could not come to step %d", member.peer, self.step)
            self._muster_again()
        elif status.answers == Kind.COMMIT or (status.answers == Kind.SYNC and status.condition != Condition.READY):
            self._sync(member)  # it came too late for a reduction, or did not get a state

    def _hear_released(self, member: Member, status: Status) -> None:
        """A stage forgot the first lease that it was told to; leases of before a muster are nobody's any more."""
        if not member.releases:
            raise ProtocolError("a stage answers a RELEASE that was not sent", peer=member.peer)
        self._dispatcher.grants.released(member.releases.popleft(), member.peer)
        if member.standing is Standing.USABLE and self._is_here(status):
            member.hear(status)
            self._take_counts(member, status, keep=True)

    def _is_here(self, status: Status) -> bool:
        """Whether a stage is ready for the step in force."""
        return (
            self.run is not None
            and status.condition == Condition.READY
            and status.step == self.step
            and status.run == encode_run(self.run)
        )

    def _take_counts(self, member: Member, status: Status, *, keep: bool) -> None:
        """What a stage has counted. `keep`: besides what is known already, which may be newer than what it said."""
        masks = masks_of(status.counted, self._ledger.everything)
        losses = zip(_bits(masks.get(self._units - 1, 0)), status.losses, strict=False)
        self._losses.update(losses)
        known = self._ledger.peers.get(member.peer)
        if keep and known is not None:
            for unit, mask in known.masks.items():
                masks[unit] = masks.get(unit, 0) | mask
        self._ledger.report(member.peer, member.span, masks)

    def _admit(self, member: Member) -> None:
        """A stage has said what it holds, in the middle of a run."""
        status = member.status
        assert status is not None
        if self.phase is Phase.MUSTERING or self.run is None:
            return
        if self._is_here(status):
            member.standing = Standing.USABLE
            self._take_counts(member, status, keep=False)
        elif status.condition == Condition.BLANK and self.step == 0 and not self._audience.history:
            member.standing = Standing.COMING
            member.send(Begin(encode_run(self.run)))
        else:
            self._sync(member)

    def _sync(self, member: Member) -> None:
        """Let a stage that is behind hear the reductions from now on, and fetch the state from its replicas."""
        assert self.run is not None
        member.standing = Standing.LISTENING
        member.listens_from = self.step + (self.phase is Phase.REDUCING)
        holders = tuple(other.peer for other in self._usable() if other.span.overlaps(member.span))
        member.send(Sync(encode_run(self.run), member.listens_from, holders))

    def _usable(self) -> list[Member]:
        return [member for member in self._members.values() if member.standing is Standing.USABLE]

    # -- trainers

    def work(self, channel: Channel, body: Work) -> None:
        """A trainer offers itself. It is refused where the swarm is in the middle of another run."""
        try:
            run = decode_run(body.run)
        except ProtocolError:
            channel.close(Error(ErrorCode.MALFORMED))
            return
        trainer = TrainerLine(channel, run, body.want)
        if not self._accepts(trainer):
            return
        channel.on_frame = lambda _frame, body: self._hear_trainer(trainer, body)
        channel.on_lost = lambda _error: self._lose_trainer(trainer)
        if self._audience.stopped is not None and (run != self.run or self._audience.stopped.code):
            self._begin_anew(run)
        self._audience.add(trainer, body.since)
        self._advance()

    def _accepts(self, trainer: TrainerLine) -> bool:
        """Whether a trainer's run is the one in force, or may become it."""
        accepted = self.run is None or trainer.run == self.run or self.phase is Phase.OVER
        if not accepted:
            trainer.channel.close(Error(ErrorCode.WRONG_RUN))
        return accepted

    def _hear_trainer(self, trainer: TrainerLine, body: Body) -> None:
        if isinstance(body, Done):
            trainer.leases.discard(body.lease)
            grant = self._dispatcher.done(body.lease)
            if grant is not None:
                for peer, span in grant.route:
                    self._ledger.count(peer, span, grant.number)
                self._losses[grant.number] = body.loss
        elif isinstance(body, Failed):
            trainer.leases.discard(body.lease)
            grant = next((grant for grant in self._dispatcher.grants if grant.lease == body.lease), None)
            if grant is not None:
                log.info("microbatch %d failed at %s: code %d", grant.number, body.peer, body.code)
                self._dispatcher.call_back(grant)
        elif isinstance(body, End | Error):
            self._lose_trainer(trainer)
        self._advance()

    def _lose_trainer(self, trainer: TrainerLine) -> None:
        if not self._audience.remove(trainer.channel):
            return
        trainer.channel.close()
        for grant in self._dispatcher.grants:
            if grant.lease in trainer.leases:
                self._dispatcher.call_back(grant)
        self._advance()

    # -- what follows

    def _advance(self) -> None:
        """Decide what follows from what is known now."""
        if self.phase is Phase.MUSTERING:
            self._muster()
        if self.phase is Phase.STEPPING:
            self._go_on()

    def _go_on(self) -> None:
        """Within a step: nobody missing, nothing twice, the rest leased, and then the reduction."""
        if self._uncovered():
            self._muster_again()
            return
        for peer in self._ledger.conflicts():
            member = self._members[peer]
            member.standing = Standing.DISCARDING
            self._ledger.lose(peer)
            member.send(Discard())
        self._dispatcher.dispatch(self._ledger)
        if self._ledger.complete() and not len(self._dispatcher.grants):
            self._reduce()

    def _uncovered(self) -> tuple[int, ...]:
        """Units that nobody holds who takes part or soon will."""
        within_moments = (Standing.USABLE, Standing.COMING, Standing.DISCARDING)
        able = [member for member in self._members.values() if member.standing in within_moments]
        held = {unit for member in able for unit in range(*member.span)}
        return tuple(unit for unit in range(self._units) if unit not in held)

    # -- mustering

    def _muster_again(self) -> None:
        """Ask everybody anew. A term of its own sees to it that leases of before, which trainers still have, are void."""
        self.phase = Phase.MUSTERING
        self.term += 1 << TERM_BITS
        self._dispatcher.clear()
        self._dispatcher.term = self.term
        for member in self._members.values():
            member.standing, member.status = Standing.ASKED, None
            member.send(Conduct(self.term))

    def _muster(self) -> None:
        """Once all have said what they hold: the step to go on from, and everybody on the way there."""
        members = [member for member in self._members.values() if member.status is not None]
        if not members or len(members) < len(self._members) or self._dialing:
            return
        run = self._run_of(members)
        if run is None:
            return
        raw = encode_run(run)
        fresh = all(not member.has_begun for member in members)
        reports = {member.peer: member.report(raw, fresh=fresh) for member in members}
        now_s = self._clock()
        waited_s = 0.0 if self._missing_since_s is None else now_s - self._missing_since_s
        alone = not any(report.ready for report in reports.values())
        found = muster(self._units, reports, roll_back=alone or waited_s >= ROLL_BACK_AFTER_S)
        self._missing = found.missing
        if found.missing:
            self._missing_since_s = self._missing_since_s if self._missing_since_s is not None else now_s
            return
        self._missing_since_s = None
        self._assemble(run, raw, found)

    def _run_of(self, members: Iterable[Member]) -> Run | None:
        """The run in force: the conductor's own, the furthest that a stage has begun, or what a trainer offers."""
        if self.run is not None:
            return self.run
        begun = [member.status for member in members if member.has_begun and member.status is not None]
        furthest = max(
            begun, key=lambda status: (status.condition, status.step, max(status.kept, default=0)), default=None
        )
        if furthest is not None:
            return decode_run(furthest.run)
        return next((trainer.run for trainer in self._audience), None)

    def _assemble(self, run: Run, raw: bytes, found: Muster) -> None:
        """Everybody to the step that was found."""
        self.run, self.step, self.phase = run, found.step, Phase.STEPPING
        self._new_ledger()
        told = next((self._members[peer].status for peer in found.stay), None)
        for peer in found.stay | found.commit | found.restore:
            member = self._members[peer]
            member.standing = Standing.COMING
            if peer in found.commit and told is not None:
                member.send(Commit(found.step - 1, told.norm, told.loss))
            elif peer in found.restore:
                member.send(Restore(raw, found.step))
            elif member.status is not None and member.status.run == raw and member.status.condition == Condition.READY:
                member.standing = Standing.USABLE
                self._take_counts(member, member.status, keep=False)
            else:
                member.send(Begin(raw))
        for peer in found.sync:
            self._sync(self._members[peer])
        if told is not None and self.step > 0 and not self._audience.history:  # it may have died before it could tell
            self._audience.tell(StepReport(self.step - 1, told.loss, 0.0, told.norm, len(found.stay)))
        self._settle_run()

    def _settle_run(self) -> None:
        """A run is in force now: trainers of other runs go, unless this one is at its end and theirs can begin."""
        assert self.run is not None
        if self.step >= self.run.steps:
            self._stop(Stopped(self.step))
        others = [trainer for trainer in self._audience if trainer.run != self.run]
        if others and self.phase is Phase.OVER:
            self._begin_anew(others[0].run)
        for trainer in others:
            if not self._accepts(trainer):
                self._audience.remove(trainer.channel)

    def _begin_anew(self, run: Run) -> None:
        """Another run, from the parameters that the last one led to; the same one again, after it had met NaN."""
        self._audience.begin_anew()
        if run == self.run:
            self._muster_again()
            return
        self.run, self.step, self.phase = run, 0, Phase.STEPPING
        self._dispatcher.clear()
        self._new_ledger()
        usable = self._usable()
        for member in usable:
            self._ledger.lose(member.peer)
            member.standing = Standing.COMING
            member.send(Begin(encode_run(run)))
        for member in self._members.values():
            if member not in usable and member.standing is not Standing.ASKED:
                self._sync(member)

    def _new_ledger(self) -> None:
        assert self.run is not None
        self._ledger = Ledger(self.step, self._units, self.run.microbatches)
        self._losses = {}
        self._began_at_s = self._clock()
        for member in self._usable():
            self._ledger.report(member.peer, member.span, {})

    # -- reducing

    def _reduce(self) -> None:
        """Everything is counted once: let the replicas of each unit agree, listeners hearing."""
        assert self.run is not None
        hearing = [member for member in self._members.values() if self._hears(member)]
        holders = [Holder(member.peer, member.span, member.standing is Standing.LISTENING) for member in hearing]
        groups = make_groups(self._units, self.run, self.step, holders, self._ledger.counts)
        self._reduction = Reduction(self.step, next(self._attempts), groups, [member.peer for member in hearing])
        self.phase = Phase.REDUCING
        for member in hearing:
            member.send(self._reduction.request(member.peer))

    def _hears(self, member: Member) -> bool:
        listens = member.standing is Standing.LISTENING and member.listens_from <= self.step
        return listens or member.standing is Standing.USABLE

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

    def _commit(self, norm: float) -> None:
        """The word that ends the step. Each square that led to the norm is finite, as their messages are."""
        assert self.run is not None
        beat_s = max((member.span.units * member.worker.unit_s for member in self._usable()), default=0.0)
        loss = math.fsum(self._losses.values()) / max(1, len(self._losses))
        for member in self._members.values():
            if self._hears(member):
                member.send(Commit(self.step, norm, loss, beat_s))
        step_s = self._clock() - self._began_at_s
        self._audience.tell(StepReport(self.step, loss, step_s, norm, len(self._usable())))
        self.step += 1
        self.phase = Phase.STEPPING
        self._new_ledger()
        if self.step >= self.run.steps:
            self._stop(Stopped(self.step))

    def _stop(self, stopped: Stopped) -> None:
        """The run is over, or cannot go on: the last good step stays."""
        if self.phase is Phase.OVER:
            return
        self.phase = Phase.OVER
        self._dispatcher.clear()
        if stopped.code:
            for member in self._usable():
                member.send(Discard())
        self._audience.tell(stopped)


def _bits(mask: int) -> list[int]:
    """Numbers of the bits that are set."""
    return [number for number in range(mask.bit_length()) if mask >> number & 1]
