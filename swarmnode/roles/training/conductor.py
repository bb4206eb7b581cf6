"""Conductor: shares out a step's microbatches, sees that each is counted once, and gives the word to reduce and commit.

Any ready node can conduct, the eldest does. What a conductor knows is what the stages and trainers told it, so when it is
lost the next one asks again and goes on. A term numbers the conductors: stages follow the highest that they heard.

    roll call    asking the ensemble who holds what; where units are missing, waiting (`roll_call.py`)
    course       the steps of the run in force (`course.py`), until it is over or broken

Every event changes what is known and then calls `_advance`, which decides what follows; nothing here waits in between.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable

from swarmnode.codec.frames import Kind
from swarmnode.codec.messages import Body, End, Error
from swarmnode.codec.training_messages import Done, Failed, Status, StepReport, Work
from swarmnode.errors import ErrorCode, ProtocolError
from swarmnode.net.interfaces import PeerId
from swarmnode.net.switchboard import Channel
from swarmnode.net.tasks import Tasks
from swarmnode.roles.training.audience import Audience, TrainerLine
from swarmnode.roles.training.course import Course, Phase
from swarmnode.roles.training.dispatcher import Dispatcher
from swarmnode.roles.training.ensemble import Dial, Ensemble
from swarmnode.roles.training.member import Member
from swarmnode.roles.training.roll_call import RollCall, furthest_run
from swarmnode.swarm.run import Run, decode_run

LOOK_S = 1.0
TERM_BITS = 16  # of a term that tell conductors apart


class Conductor:
    """A peer's time in office, with a new term for each roll call. `dial` opens a conversation with a stage; `resigned` is
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
        self._units = units
        self._resigned = resigned
        self._clock = clock
        self._ensemble = Ensemble(dial, joined=lambda member: member.ask(self.term), heard=self._hear, lost=self._lose)
        self._audience = Audience()
        self._dispatcher = Dispatcher(term, units, self._ensemble.members, self._audience)
        self._attempts = itertools.count()
        self._roll_call: RollCall | None = RollCall(units, clock)
        self._course: Course | None = None  # the one before, while roll is called
        self._tasks = Tasks("conductor")

    def __repr__(self) -> str:
        return f"<Conductor of term {self.term}, {self._ensemble!r}, {self._roll_call or self._course!r}>"

    def start(self) -> None:
        """Begin to watch the clock."""
        self._tasks.spawn(self._tick(), "clock")

    async def close(self) -> None:
        """Let go of everybody; the next conductor will ask them."""
        await self._tasks.close()
        await self._ensemble.close()
        for trainer in self._audience:
            trainer.channel.close()

    def enlist(self, peers: Iterable[PeerId]) -> None:
        """These stages are there: speak to those that are new."""
        self._ensemble.enlist(peers)

    async def _tick(self) -> None:
        """What only time brings about: steps on disk that begin to count, and news for those who wait."""
        while True:
            await asyncio.sleep(LOOK_S)
            if self._roll_call is not None and self._roll_call.missing:
                step = 0 if self._course is None else self._course.step
                self._audience.tell(StepReport(step, missing=self._roll_call.missing))
            self._advance()

    # -- stages

    def _hear(self, member: Member, body: Body) -> None:
        if isinstance(body, Status):
            self._hear_status(member, body)
        elif self._going is not None:
            self._going.hear(member, body)
        self._advance()

    def _hear_status(self, member: Member, status: Status) -> None:
        if status.term > self.term:
            self._resigned(status.term)
            return
        if status.answers == Kind.RELEASE:
            self._dispatcher.released(member)
        elif member.status is None and status.answers != Kind.CONDUCT:
            return  # told before it heard our CONDUCT: it may have counted more since
        else:
            member.hear(status)
        if self._going is not None:
            self._going.hear(member, status)

    def _lose(self, peer: PeerId) -> None:
        """A stage is gone with what it had counted."""
        self._dispatcher.lose(peer)
        if self._course is not None:
            self._course.lose(peer)
        self._advance()

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
        if self._audience.stopped is not None and (run != self._run or self._audience.stopped.code):
            self._begin_anew(run)
        self._audience.add(trainer, body.since)
        self._advance()

    def _accepts(self, trainer: TrainerLine) -> bool:
        """Whether a trainer's run is the one in force, or may become it."""
        accepted = self._run is None or trainer.run == self._run or self._is_over
        if not accepted:
            trainer.channel.close(Error(ErrorCode.WRONG_RUN))
        return accepted

    def _hear_trainer(self, trainer: TrainerLine, body: Body) -> None:
        if isinstance(body, Done):
            grant = self._dispatcher.done(trainer, body.lease)
            if grant is not None and self._course is not None:
                self._course.count(grant, body.loss)
        elif isinstance(body, Failed):
            self._dispatcher.failed(trainer, body)
        elif isinstance(body, End | Error):
            self._lose_trainer(trainer)
        self._advance()

    def _lose_trainer(self, trainer: TrainerLine) -> None:
        if self._audience.remove(trainer.channel):
            trainer.channel.close()
            self._dispatcher.lose_trainer(trainer)
            self._advance()

    # -- what follows

    @property
    def _run(self) -> Run | None:
        """The run in force."""
        return None if self._course is None else self._course.run

    @property
    def _going(self) -> Course | None:
        """The course, unless roll is being called."""
        return self._course if self._roll_call is None else None

    @property
    def _is_over(self) -> bool:
        return self._going is not None and self._going.phase is Phase.OVER

    def _advance(self) -> None:
        """Decide what follows from what is known now."""
        if self._roll_call is not None:
            self._muster(self._roll_call)
        if self._going is not None:
            self._going.go_on()
            if self._going.phase is Phase.BROKEN:
                self._call_roll()

    def _call_roll(self) -> None:
        """Ask everybody anew. A term of its own sees to it that leases of before, which trainers still have, are void."""
        self._roll_call = RollCall(self._units, self._clock)
        self.term += 1 << TERM_BITS
        self._dispatcher.clear()
        self._dispatcher.term = self.term
        for member in self._ensemble:
            member.ask(self.term)

    def _muster(self, roll_call: RollCall) -> None:
        """Once all have said what they hold: everybody to the step to go on from, in the run in force, the furthest that a stage
        has begun, or what a trainer offers."""
        if not self._ensemble.all_answered:
            return
        offered = (trainer.run for trainer in self._audience)
        run = self._run or furthest_run(self._ensemble) or next(offered, None)
        found = roll_call.find(self._ensemble, run) if run is not None else None
        if run is None or found is None:
            return
        self._roll_call, self._course = None, self._open(run, found.step)
        self._course.gather(found)
        self._dismiss_others()

    def _open(self, run: Run, step: int) -> Course:
        return Course(
            run,
            step,
            self._units,
            self._ensemble,
            self._dispatcher,
            self._audience,
            attempts=self._attempts,
            clock=self._clock,
        )

    def _dismiss_others(self) -> None:
        """A run is in force now: trainers of other runs go, unless this one is at its end and theirs can begin."""
        others = [trainer for trainer in self._audience if trainer.run != self._run]
        if others and self._is_over:
            self._begin_anew(others[0].run)
        for trainer in others:
            if not self._accepts(trainer):
                self._audience.remove(trainer.channel)

    def _begin_anew(self, run: Run) -> None:
        """Another run, from the parameters that the last one led to; the same one again, after it had met NaN."""
        self._audience.begin_anew()
        if run == self._run:
            self._call_roll()
            return
        self._dispatcher.clear()
        self._course = self._open(run, 0)
        self._course.begin()
