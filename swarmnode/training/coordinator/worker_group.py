"""Worker group: the stages that a coordinator leads, the state and the open commands of each, and the loopback to its own stage."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from typing import Union

from swarmnode.codec.body import Body
from swarmnode.codec.frames import Frame, FrameKind
from swarmnode.codec.messages import KIND_OF, End, Error
from swarmnode.codec.training_messages import Condition, Lead, Release, Status, Sync
from swarmnode.errors import PeerError, PeerLost, SwarmnodeError
from swarmnode.links.switchboard import Channel
from swarmnode.net.interfaces import PeerId
from swarmnode.net.tasks import Tasks
from swarmnode.plan.training.coordination import HoldingReport
from swarmnode.plan.training.wiring import Replica
from swarmnode.plan.view import Span
from swarmnode.swarm.records.run import decode_run
from swarmnode.training.coordinator.timeouts import AnswerTimes, Strikes

log = logging.getLogger(__name__)

MOVES = (FrameKind.BEGIN, FrameKind.SYNC, FrameKind.RESTORE)  # a later one replaces an earlier one


class Loopback:
    """End of a conversation within this process; `pair` makes both. Messages arrive in order, in a later turn of the event loop."""

    rtt_s: float | None = 0.0

    def __init__(self, peer: PeerId) -> None:
        self.peer = peer
        self.on_frame: Callable[[Frame, Body], None] = lambda _frame, _body: None
        self.on_lost: Callable[[PeerError], None] = lambda _error: None
        self.open = True
        self._other: Loopback = self

    @classmethod
    def pair(cls, peer: PeerId) -> tuple[Loopback, Loopback]:
        """Create the two ends of a new conversation."""
        here, there = cls(peer), cls(peer)
        here._other, there._other = there, here
        return here, there

    def send(self, body: Body) -> None:
        """Deliver a message to the other end, on the event loop's next turn."""
        asyncio.get_running_loop().call_soon(self._other._hear, body)

    def close(self, last: Body | None = None) -> None:
        """End the conversation with the message `last` (default: END)."""
        if self.open:
            self.open = False
            self.send(last or End())

    def _hear(self, body: Body) -> None:
        if self.open:
            self.open = not isinstance(body, End)
            self.on_frame(Frame(KIND_OF[type(body)], 0, 0, b""), body)


Line = Union[Channel, Loopback]
Dial = Callable[[PeerId, Callable[[Frame, Body], None], Callable[[PeerError], None]], Awaitable[Line]]


class WorkerState(Enum):
    """State of a member, which decides what it can be asked to do."""

    ASKED = "asked"  # has not reported its holdings yet
    COMING = "coming"  # on its way to the current step, within moments
    DISCARDING = "discarding"  # forgets its counts, since others counted the same microbatches
    LISTENING = "listening"  # takes part in the all-reduces while it fetches the state
    USABLE = "usable"


TOLD_TO = {
    FrameKind.LEAD: WorkerState.ASKED,
    FrameKind.BEGIN: WorkerState.COMING,
    FrameKind.RESTORE: WorkerState.COMING,
    FrameKind.SYNC: WorkerState.LISTENING,
    FrameKind.DISCARD: WorkerState.DISCARDING,
}
"""The state of a member after a command; other commands do not change it."""

WITHIN_MOMENTS = (WorkerState.USABLE, WorkerState.COMING, WorkerState.DISCARDING)  # take part, or will soon


@dataclass
class Command:
    """A command without an answer. `wait_s` is its time limit, counted from the answer to the command before."""

    kind: FrameKind
    began_s: float
    wait_s: float
    leases: tuple[int, ...] = ()


@dataclass
class WorkerHandle:
    """Coordinator's view of one stage: the line to it, its last status, and its unanswered commands, in order. `clock` returns
    seconds."""

    peer: PeerId
    line: Line
    clock: Callable[[], float]
    state: WorkerState = WorkerState.ASKED
    status: Status | None = None
    worker: Replica = field(default_factory=lambda: Replica(Span(0, 0)))
    listens_from: int = 0  # the first step whose all-reduce it takes part in
    refuses: bool = False  # it answered the last BEGIN or RESTORE without going to the step
    moves: int = 0  # to another run or step, which ends its memory of averagings
    asked: deque[Command] = field(default_factory=deque)
    times: AnswerTimes = field(default_factory=AnswerTimes)

    @property
    def span(self) -> Span:
        """Layers [start, end) that the stage reports to hold."""
        return self.worker.span

    @property
    def has_begun(self) -> bool:
        """Whether the stage takes part in a training run, or has steps of one on its disk."""
        status = self.status
        return status is not None and bool(status.run) and (status.condition != Condition.BLANK or bool(status.kept))

    @property
    def is_as_founded(self) -> bool:
        """Whether the stage has the founder's parameters: it is in no run yet, or at step 0 of the first run. A stage at step 0 of
        a later run has that step on its disk (`StageState.begin`)."""
        status = self.status
        return not self.has_begun or (status is not None and status.step == 0 and not status.kept)

    # -- commands

    def send(self, body: Body) -> None:
        """Send a message to the stage. Does nothing if the line is cut: its loss is about to be noticed."""
        if self.line.open:
            self.line.send(body)

    def command(self, body: Body, *, wait_s: float | None = None) -> None:
        """Send a command, and expect the answer within `wait_s` seconds; None derives the limit from earlier answers. A SYNC
        expects no answer in time; the stage takes part in all-reduces from its step on."""
        kind = FrameKind(KIND_OF[type(body)])
        if wait_s is None:
            pass_s = self.worker.unit_s * self.span.units
            wait_s = self.times.wait_s(kind, rtt_s=self.line.rtt_s or 0.0, work_s=2 * pass_s)
        self.state = TOLD_TO.get(kind, self.state)
        self.moves += kind in MOVES
        gives_up = MOVES if kind in MOVES else (kind,) if kind == FrameKind.REDUCE else ()
        self.asked = deque(command for command in self.asked if command.kind not in gives_up)
        if isinstance(body, Sync):  # takes as long as fetching a state; meanwhile no other stage needs an answer
            self.listens_from = body.step
        else:
            leases = body.leases if isinstance(body, Release) else ()
            self.asked.append(Command(kind, self.clock(), wait_s, leases))
        self.send(body)

    def answered(self, kind: int) -> Command | None:
        """Remove and return the first unanswered command of this kind; None if there is none."""
        found = next((command for command in self.asked if command.kind == kind), None)
        if found is not None:
            now_s = self.clock()
            self.times.note(found.kind, now_s - found.began_s)
            self.asked.remove(found)
            if self.asked:
                self.asked[0].began_s = max(self.asked[0].began_s, now_s)
        return found

    def overdue(self, *, at_least_s: float = 0.0) -> Command | None:
        """Return the first unanswered command if it is past its deadline, else None. A stage does one command after another."""
        first = self.asked[0] if self.asked else None
        return first if first is not None and self.clock() > first.began_s + max(first.wait_s, at_least_s) else None

    def ask(self, term: int, key: bytes) -> None:
        """Ask the stage for its layers, step and counts, by a LEAD message of this term."""
        self.status = None
        self.command(Lead(term, key))

    # -- messages

    def hear(self, status: Status) -> None:
        """Take in a stage's status. Raises ProtocolError if its run is invalid, which ends the stage's line only."""
        if status.run:
            decode_run(status.run)
        self.status = status
        if status.answers in MOVES:
            self.refuses = status.condition != Condition.READY and status.answers != FrameKind.SYNC
        self.worker.span = Span(status.start, status.end)
        self.worker.unit_s = status.unit_s
        self.worker.window = status.window

    def hears(self, step: int) -> bool:
        """Return whether the stage takes part in the all-reduce of `step`."""
        listens = self.state is WorkerState.LISTENING and self.listens_from <= step
        return listens or self.state is WorkerState.USABLE

    def report(self, run: bytes, *, fresh: bool) -> HoldingReport:
        """Return the stage's place in `run` for the recovery plan. `fresh`: all stages are as founded, so that a stage in
        no run can begin."""
        status = self.status
        assert status is not None
        begun = status.run == run and status.condition == Condition.READY
        kept = frozenset(status.kept) if status.run == run else frozenset()
        step, founded = (status.step, status.founded) if begun else (0, False)
        return HoldingReport(self.span, step, begun or fresh, begun and status.reduced, kept, founded)


@dataclass(eq=False)
class WorkerGroup:
    """The stages of a training, as the coordinator follows them.

    `dial` opens a conversation with a stage. `joined` is called for each stage that is reached, `heard` for each of its messages,
    and `lost`, with the reason, once it is gone. A stage that failed lately (`strikes`) is called again after a growing pause.
    """

    dial: Dial
    strikes: Strikes
    _: KW_ONLY
    clock: Callable[[], float]
    joined: Callable[[WorkerHandle], None]
    heard: Callable[[WorkerHandle, Body], None]
    lost: Callable[[PeerId, str], None]

    def __post_init__(self) -> None:
        self.members: dict[PeerId, WorkerHandle] = {}
        self._dialing: set[PeerId] = set()
        self._tasks = Tasks("worker_group", on_crash=None)  # a stage that is not reached is called again

    def __repr__(self) -> str:
        return f"<WorkerGroup of {len(self.members)} stages, {len(self._dialing)} more called>"

    def __iter__(self) -> Iterator[WorkerHandle]:
        return iter(list(self.members.values()))

    async def close(self) -> None:
        """End all conversations, and the calls that are under way."""
        await self._tasks.close()
        for member in self:
            member.line.close()

    def enlist(self, peers: Iterable[PeerId]) -> None:
        """Connect to those of the stages `peers` that are not connected, being dialled, banned or backing off."""
        for peer in peers:
            if peer not in self.members and peer not in self._dialing and not self.strikes.rests(peer):
                self._dialing.add(peer)
                self._tasks.spawn(self._call(peer), f"call {peer}")

    async def _call(self, peer: PeerId) -> None:
        try:
            line = await self.dial(
                peer, lambda _frame, body: self._hear(peer, body), lambda error: self._lose(peer, error)
            )
        except SwarmnodeError as error:
            log.info("stage %s cannot be reached: %s", peer, error)
            self.strikes.strike(peer)
            return
        finally:
            self._dialing.discard(peer)
        member = self.members[peer] = WorkerHandle(peer, line, self.clock)
        self.joined(member)

    def _hear(self, peer: PeerId, body: Body) -> None:
        if isinstance(body, End | Error):
            self._lose(peer)
        elif peer in self.members:
            self.heard(self.members[peer], body)

    def _lose(self, peer: PeerId, error: PeerError | None = None) -> None:
        member = self.members.pop(peer, None)
        if member is not None:
            reason = str(error or "it closed the connection")
            log.info("stage %s is lost: %s", peer, reason)
            self.strikes.strike(peer)
            member.line.close()
            self.lost(peer, reason)

    def dismiss(self, peer: PeerId, reason: str) -> None:
        """Drop the stage of `peer`, which does not do its part, as if its link were lost; `reason` is the text."""
        self._lose(peer, PeerLost(reason, peer=peer))

    @property
    def all_answered(self) -> bool:
        """Whether there is a stage, and every called or asked stage has reported its holdings."""
        return bool(self.members) and not self._dialing and all(member.status is not None for member in self)

    def usable(self) -> list[WorkerHandle]:
        """Return the members of the training whose stages can be given work."""
        return [member for member in self if member.state is WorkerState.USABLE]

    def hearing(self, step: int) -> list[WorkerHandle]:
        """Return the stages that take part in the all-reduce of `step`."""
        return [member for member in self if member.hears(step)]

    def answered(self) -> list[WorkerHandle]:
        """Return the members whose stages have reported their layers and step."""
        return [member for member in self if member.status is not None]

    def can_spare(self, peer: PeerId) -> bool:
        """Return whether other usable stages hold all layers of `peer`; False if `peer` is not a member."""
        held = {unit for member in self.usable() if member.peer != peer for unit in range(*member.span)}
        return peer in self.members and held.issuperset(range(*self.members[peer].span))

    def uncovered(self, units: int) -> tuple[int, ...]:
        """Return the layers that no stage holds that takes part, or soon will."""
        able = [member for member in self if member.state in WITHIN_MOMENTS]
        held = {unit for member in able for unit in range(*member.span)}
        return tuple(unit for unit in range(units) if unit not in held)
