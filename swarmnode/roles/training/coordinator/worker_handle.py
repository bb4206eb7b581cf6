"""Worker handle: a stage as the coordinator sees it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Union

from swarmnode.codec.frames import FrameKind
from swarmnode.codec.messages import KIND_OF, Body
from swarmnode.codec.training_messages import Begin, Condition, Discard, Lead, Release, Restore, Status, Sync
from swarmnode.net.interfaces import PeerId
from swarmnode.net.links.switchboard import Channel
from swarmnode.plan.training.recovery import HoldingReport
from swarmnode.plan.training.wiring import Replica
from swarmnode.plan.view import Span
from swarmnode.roles.training.coordinator.answer_times import AnswerTimes
from swarmnode.roles.training.coordinator.loopback import Loopback
from swarmnode.swarm.records.run import decode_run

Line = Union[Channel, Loopback]

MOVES = (FrameKind.BEGIN, FrameKind.SYNC, FrameKind.RESTORE)  # a later one gives up the earlier one


class WorkerState(Enum):
    """What may be asked of a member."""

    ASKED = "asked"  # has not said yet what it holds
    COMING = "coming"  # on its way to the step in force, within moments
    DISCARDING = "discarding"  # forgets what it had counted, since others counted the same
    LISTENING = "listening"  # hears the all-reduces while it fetches the state
    USABLE = "usable"


@dataclass
class Command:
    """One that is not answered yet. `wait_s`: from when all before it were answered."""

    kind: FrameKind
    began_s: float
    wait_s: float
    leases: tuple[int, ...] = ()


@dataclass
class WorkerHandle:
    """A stage, the line to it, what it said last, and what it has not answered yet, in order. `clock` in seconds."""

    peer: PeerId
    line: Line
    clock: Callable[[], float]
    state: WorkerState = WorkerState.ASKED
    status: Status | None = None
    worker: Replica = field(default_factory=lambda: Replica(Span(0, 0)))
    listens_from: int = 0  # the first step whose all-reduce it hears
    moves: int = 0  # to another run or step, which left what it remembered of averagings behind
    asked: deque[Command] = field(default_factory=deque)
    times: AnswerTimes = field(default_factory=AnswerTimes)

    @property
    def span(self) -> Span:
        """The units that it says it holds."""
        return self.worker.span

    @property
    def has_begun(self) -> bool:
        """Whether it is in a run, or has steps of one on its disk."""
        status = self.status
        return status is not None and bool(status.run) and (status.condition != Condition.BLANK or bool(status.kept))

    @property
    def is_as_founded(self) -> bool:
        """Whether it has the founding's parameters: it is in no run yet, or in the first step of the first one. That of a later run
        is on the disk of who begins it (`StageState.begin`)."""
        status = self.status
        return not self.has_begun or (status is not None and status.step == 0 and not status.kept)

    # -- what it is told

    def send(self, body: Body) -> None:
        """Tell it something; where the line is cut, its loss is about to be heard of."""
        if self.line.open:
            self.line.send(body)

    def command(self, body: Body, *, wait_s: float | None = None) -> None:
        """Tell it to do something, and expect the answer within `wait_s`; else within what such a thing takes it."""
        kind = FrameKind(KIND_OF[type(body)])
        if wait_s is None:
            pass_s = self.worker.unit_s * self.span.units
            wait_s = self.times.wait_s(kind, rtt_s=self.line.rtt_s or 0.0, work_s=2 * pass_s)
        self.moves += kind in MOVES
        gives_up = MOVES if kind in MOVES else (kind,) if kind == FrameKind.REDUCE else ()
        self.asked = deque(command for command in self.asked if command.kind not in gives_up)
        if kind != FrameKind.SYNC:  # takes as long as a state takes to be fetched; meanwhile nothing needs it
            leases = body.leases if isinstance(body, Release) else ()
            self.asked.append(Command(kind, self.clock(), wait_s, leases))
        self.send(body)

    def answered(self, kind: int) -> Command | None:
        """The first command of this kind that it has not answered before, if there is one."""
        found = next((command for command in self.asked if command.kind == kind), None)
        if found is not None:
            now_s = self.clock()
            self.times.note(found.kind, now_s - found.began_s)
            self.asked.remove(found)
            if self.asked:
                self.asked[0].began_s = max(self.asked[0].began_s, now_s)
        return found

    def overdue(self, *, at_least_s: float = 0.0) -> Command | None:
        """What it should have done by now: the first thing asked, for it does one after another."""
        first = self.asked[0] if self.asked else None
        return first if first is not None and self.clock() > first.began_s + max(first.wait_s, at_least_s) else None

    def ask(self, term: int, key: bytes) -> None:
        """Have it say what it holds."""
        self.state, self.status = WorkerState.ASKED, None
        self.command(Lead(term, key))

    def begin(self, run: bytes) -> None:
        """Have it come to step 0 of a run."""
        self.state = WorkerState.COMING
        self.command(Begin(run))

    def restore(self, run: bytes, step: int) -> None:
        """Have it come to a step that it has on its disk."""
        self.state = WorkerState.COMING
        self.command(Restore(run, step))

    def sync(self, run: bytes, step: int, holders: tuple[PeerId, ...]) -> None:
        """Have it hear the all-reduces from `step` on, and fetch the state from the holders."""
        self.state, self.listens_from = WorkerState.LISTENING, step
        self.command(Sync(run, step, holders))

    def discard(self, run: bytes) -> None:
        """Have it forget what it has counted in this step."""
        self.state = WorkerState.DISCARDING
        self.command(Discard(run))

    # -- what it says

    def hear(self, status: Status) -> None:
        """Take in what it says of itself. Raises ProtocolError where the run that it is in is none: it breaks its own line by that,
        and not the coordinator, which would go on from it."""
        if status.run:
            decode_run(status.run)
        self.status = status
        self.worker.span = Span(status.start, status.end)
        self.worker.unit_s = status.unit_s
        self.worker.window = status.window

    def hears(self, step: int) -> bool:
        """Whether it hears the all-reduce of a step."""
        listens = self.state is WorkerState.LISTENING and self.listens_from <= step
        return listens or self.state is WorkerState.USABLE

    def report(self, run: bytes, *, fresh: bool) -> HoldingReport:
        """Its place in a run, for the recovery plan. `fresh`: all are as founded, so that who is in no run yet can begin."""
        status = self.status
        assert status is not None
        begun = status.run == run and status.condition == Condition.READY
        kept = frozenset(status.kept) if status.run == run else frozenset()
        step, founded = (status.step, status.founded) if begun else (0, False)
        return HoldingReport(self.span, step, begun or fresh, begun and status.reduced, kept, founded)
