"""Coordinator: shares out a step's microbatches, sees that each is counted once, and gives the word to reduce and commit.

Any ready node can lead, the eldest does. What a coordinator knows is what the stages and trainers told it, so when it is
lost the next one asks again and goes on. A term numbers the coordinators: stages follow the highest that they heard.

    rendezvous    asking the worker group who holds what; where units are missing, waiting (`rendezvous.py`)
    step loop       the steps of the run in force (`step_loop.py`), until it is over or broken

Every event changes what is known and then calls `_advance`, which decides what follows; nothing here waits in between.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable

from swarmnode.codec.frames import FrameKind
from swarmnode.codec.messages import Body, End, Error
from swarmnode.codec.training_messages import Done, Failed, Status, StepReport, Work
from swarmnode.errors import ErrorCode, ProtocolError
from swarmnode.net.interfaces import PeerId
from swarmnode.net.links.switchboard import Channel
from swarmnode.net.tasks import Tasks
from swarmnode.roles.training.coordinator.dispatcher import Dispatcher
from swarmnode.roles.training.coordinator.rendezvous import Rendezvous, furthest_run
from swarmnode.roles.training.coordinator.step_loop import Phase, StepLoop
from swarmnode.roles.training.coordinator.trainer_connections import TrainerConnections, TrainerLine
from swarmnode.roles.training.coordinator.worker_group import Dial, WorkerGroup
from swarmnode.roles.training.coordinator.worker_handle import WorkerHandle
from swarmnode.swarm.records.run import Run, decode_run

LOOK_S = 1.0
TERM_BITS = 16  # of a term that tell coordinators apart


class Coordinator:
    """A peer's time in office, with a new term for each rendezvous. `dial` opens a conversation with a stage; `resigned` is
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
        self._worker_group = WorkerGroup(
            dial, joined=lambda member: member.ask(self.term), heard=self._hear, lost=self._lose
        )
        self._trainer_connections = TrainerConnections()
        self._dispatcher = Dispatcher(term, units, self._worker_group.members, self._trainer_connections)
        self._attempts = itertools.count()
        self._rendezvous: Rendezvous | None = Rendezvous(units, clock)
        self._step_loop: StepLoop | None = None  # the one before, while roll is called
        self._tasks = Tasks("coordinator")

    def __repr__(self) -> str:
        return f"<Coordinator of term {self.term}, {self._worker_group!r}, {self._rendezvous or self._step_loop!r}>"

    def start(self) -> None:
        """Begin to watch the clock."""
        self._tasks.spawn(self._tick(), "clock")

    async def close(self) -> None:
        """Let go of everybody; the next coordinator will ask them."""
        await self._tasks.close()
        await self._worker_group.close()
        for trainer in self._trainer_connections:
            trainer.channel.close()

    def enlist(self, peers: Iterable[PeerId]) -> None:
        """These stages are there: speak to those that are new."""
        self._worker_group.enlist(peers)

    async def _tick(self) -> None:
        """What only time brings about: steps on disk that begin to count, and news for those who wait."""
        while True:
            await asyncio.sleep(LOOK_S)
            if self._rendezvous is not None and self._rendezvous.missing:
                step = 0 if self._step_loop is None else self._step_loop.step
                self._trainer_connections.tell(StepReport(step, missing=self._rendezvous.missing))
            self._advance()

    # -- stages

    def _hear(self, member: WorkerHandle, body: Body) -> None:
        if isinstance(body, Status):
            self._hear_status(member, body)
        elif self._going is not None:
            self._going.hear(member, body)
        self._advance()

    def _hear_status(self, member: WorkerHandle, status: Status) -> None:
        if status.term > self.term:
            self._resigned(status.term)
            return
        if status.answers == FrameKind.RELEASE:
            self._dispatcher.released(member)
        elif member.status is None and status.answers != FrameKind.LEAD:
            return  # told before it heard our LEAD: it may have counted more since
        else:
            member.hear(status)
        if self._going is not None:
            self._going.hear(member, status)

    def _lose(self, peer: PeerId) -> None:
        """A stage is gone with what it had counted."""
        self._dispatcher.lose(peer)
        if self._step_loop is not None:
            self._step_loop.lose(peer)
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
        if self._trainer_connections.stopped is not None and (
            run != self._run or self._trainer_connections.stopped.code
        ):
            self._begin_anew(run)
        self._trainer_connections.add(trainer, body.since)
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
            if grant is not None and self._step_loop is not None:
                self._step_loop.count(grant, body.loss)
        elif isinstance(body, Failed):
            self._dispatcher.failed(trainer, body)
        elif isinstance(body, End | Error):
            self._lose_trainer(trainer)
        self._advance()

    def _lose_trainer(self, trainer: TrainerLine) -> None:
        if self._trainer_connections.remove(trainer.channel):
            trainer.channel.close()
            self._dispatcher.lose_trainer(trainer)
            self._advance()

    # -- what follows

    @property
    def _run(self) -> Run | None:
        """The run in force."""
        return None if self._step_loop is None else self._step_loop.run

    @property
    def _going(self) -> StepLoop | None:
        """The step loop, unless roll is being called."""
        return self._step_loop if self._rendezvous is None else None

    @property
    def _is_over(self) -> bool:
        return self._going is not None and self._going.phase is Phase.OVER

    def _advance(self) -> None:
        """Decide what follows from what is known now."""
        if self._rendezvous is not None:
            self._recovery_plan(self._rendezvous)
        if self._going is not None:
            self._going.go_on()
            if self._going.phase is Phase.BROKEN:
                self._call_roll()

    def _call_roll(self) -> None:
        """Ask everybody anew. A term of its own sees to it that leases of before, which trainers still have, are void."""
        self._rendezvous = Rendezvous(self._units, self._clock)
        self.term += 1 << TERM_BITS
        self._dispatcher.clear()
        self._dispatcher.term = self.term
        for member in self._worker_group:
            member.ask(self.term)

    def _recovery_plan(self, rendezvous: Rendezvous) -> None:
        """Once all have said what they hold: everybody to the step to go on from, in the run in force, the furthest that a stage
        has begun, or what a trainer offers."""
        if not self._worker_group.all_answered:
            return
        offered = (trainer.run for trainer in self._trainer_connections)
        run = self._run or furthest_run(self._worker_group) or next(offered, None)
        found = rendezvous.find(self._worker_group, run) if run is not None else None
        if run is None or found is None:
            return
        self._rendezvous, self._step_loop = None, self._open(run, found.step)
        self._step_loop.gather(found)
        self._dismiss_others()

    def _open(self, run: Run, step: int) -> StepLoop:
        return StepLoop(
            run,
            step,
            self._units,
            self._worker_group,
            self._dispatcher,
            self._trainer_connections,
            attempts=self._attempts,
            clock=self._clock,
        )

    def _dismiss_others(self) -> None:
        """A run is in force now: trainers of other runs go, unless this one is at its end and theirs can begin."""
        others = [trainer for trainer in self._trainer_connections if trainer.run != self._run]
        if others and self._is_over:
            self._begin_anew(others[0].run)
        for trainer in others:
            if not self._accepts(trainer):
                self._trainer_connections.remove(trainer.channel)

    def _begin_anew(self, run: Run) -> None:
        """Another run, from the parameters that the last one led to; the same one again, after it had met NaN."""
        self._trainer_connections.begin_anew()
        if run == self._run:
            self._call_roll()
            return
        self._dispatcher.clear()
        self._step_loop = self._open(run, 0)
        self._step_loop.begin()
