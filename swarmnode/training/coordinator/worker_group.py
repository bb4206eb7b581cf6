"""Worker group: the stages that a coordinator leads, the state and the open commands of each, and the loopback to its own stage.

Following: the coordinator that a stage follows. A coordinator that falls silent counts as lost, even if its link is alive.

Waits: the peers that a coordinator waits for, as it reports them, and the sentences that show them to a user.
"""

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
from swarmnode.codec.training_messages import MAX_WAITS, Condition, Lead, ProgressReport, Release, Status, Sync, Wait
from swarmnode.errors import ErrorCode, PeerError, PeerLost, SwarmnodeError
from swarmnode.links.switchboard import Channel
from swarmnode.net.clock import Backoff
from swarmnode.net.interfaces import PeerId
from swarmnode.net.tasks import OnCrash, Tasks
from swarmnode.plan.training.coordination import HoldingReport
from swarmnode.plan.training.step_ledger import OutstandingLease
from swarmnode.plan.training.wiring import Replica
from swarmnode.plan.view import Span
from swarmnode.swarm.records.run import decode_run
from swarmnode.training.coordinator.link_times import SILENCE_S, STALLED_S, AnswerTimes, Failures

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
        asyncio.get_running_loop().call_soon(self._other._receive, body)

    def close(self, last: Body | None = None) -> None:
        """End the conversation with the message `last` (default: END)."""
        if self.open:
            self.open = False
            self.send(last or End())

    def _receive(self, body: Body) -> None:
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
            self.times.record(found.kind, now_s - found.began_s)
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

    def receive(self, status: Status) -> None:
        """Take in a stage's status. Raises ProtocolError if its run is invalid, which ends the stage's line only."""
        if status.run:
            decode_run(status.run)
        self.status = status
        if status.answers in MOVES:
            self.refuses = status.condition != Condition.READY and status.answers != FrameKind.SYNC
        self.worker.span = Span(status.start, status.end)
        self.worker.unit_s = status.unit_s
        self.worker.window = status.window

    def joins_all_reduce(self, step: int) -> bool:
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

    `dial` opens a conversation with a stage. `joined` is called for each stage that is reached, `received` for each of its
    messages, and `lost`, with the reason, once it is gone. A stage that failed lately (`failures`) is called again after a
    growing pause.
    """

    dial: Dial
    failures: Failures
    _: KW_ONLY
    clock: Callable[[], float]
    joined: Callable[[WorkerHandle], None]
    received: Callable[[WorkerHandle, Body], None]
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
            if peer not in self.members and peer not in self._dialing and not self.failures.rests(peer):
                self._dialing.add(peer)
                self._tasks.spawn(self._call(peer), f"call {peer}")

    async def _call(self, peer: PeerId) -> None:
        try:
            line = await self.dial(
                peer, lambda _frame, body: self._receive(peer, body), lambda error: self._lose(peer, error)
            )
        except SwarmnodeError as error:
            log.info("stage %s cannot be reached: %s", peer, error)
            self.failures.record(peer)
            return
        finally:
            self._dialing.discard(peer)
        member = self.members[peer] = WorkerHandle(peer, line, self.clock)
        self.joined(member)

    def _receive(self, peer: PeerId, body: Body) -> None:
        if isinstance(body, End | Error):
            self._lose(peer)
        elif peer in self.members:
            self.received(self.members[peer], body)

    def _lose(self, peer: PeerId, error: PeerError | None = None) -> None:
        member = self.members.pop(peer, None)
        if member is not None:
            reason = str(error or "it closed the connection")
            log.info("stage %s is lost: %s", peer, reason)
            self.failures.record(peer)
            member.line.close()
            self.lost(peer, reason)

    def dismiss(self, peer: PeerId, reason: str) -> None:
        """Drop the stage of `peer`, which does not do its part, as if its link were lost; `reason` is the text."""
        self.failures.leave_out(peer, reason)
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
        return [member for member in self if member.joins_all_reduce(step)]

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


TICK_S = 0.5
IDLER_S, MOST_IDLER_S = 60.0, 3600.0  # pause before a coordinator that gave out no work is followed again
MAX_CLAIMS = 64
CLAIM_S = 60.0  # longest conversation of a coordinator that is not in force
MAX_TERM_JUMP = 1 << 32  # 65536 coordinators: one peer's word must not use up all terms


class Following:
    """The stage's coordinator and term. `on_followed` is called with each coordinator that comes into force. `on_lost` is called
    when a coordinator is gone, with the error, or with None if it ended the conversation."""

    def __init__(self, *, on_crash: OnCrash | None = None) -> None:
        self.term = 0
        self.key = b""  # of the seals of this term's leases
        self.coordinator: PeerId | None = None
        self.line: Line | None = None
        self.on_followed: Callable[[PeerId], None] = lambda _peer: None
        self.on_lost: Callable[[PeerId, PeerError | None], None] = lambda _peer, _error: None
        self._silent_ticks = 0
        self._deserters = Backoff(asyncio.get_running_loop().time)  # coordinators that fell silent
        self._idlers = Backoff(
            asyncio.get_running_loop().time, first_s=IDLER_S, ceiling_s=MOST_IDLER_S, forget_s=2 * MOST_IDLER_S
        )
        self._tasks = Tasks("following", on_crash=on_crash)
        self._watch: asyncio.Task[None] | None = None

    def accepts(self, line: Line, body: Lead) -> bool:
        """Follow the sender of a LEAD and return True, or return False if it must not be followed.

        It must not if its term is lower than the current one or far too high, if another coordinator has the same term, or
        if the sender fell silent or idled lately.
        """
        jumps = self.term > 0 and body.term - self.term > MAX_TERM_JUMP
        rivals = body.term == self.term and self.coordinator not in (None, line.peer)
        rests = any(backoff.pause_s(line.peer) for backoff in (self._deserters, self._idlers))
        if body.term < self.term or rivals or jumps or rests:
            return False
        self.term, self.key, self.coordinator, self.line = body.term, body.key, line.peer, line
        self.record_message()
        if self._watch is None:
            self._watch = self._tasks.spawn(self._watch_silence(), "silence")
        self.on_followed(line.peer)
        return True

    def record_message(self) -> None:
        """Record that the coordinator has sent a message."""
        self._silent_ticks = 0

    def lost(self, line: Line, error: PeerError | None) -> None:
        """Note that the line was cut, or that its other end closed it (`error` is None). Ignores lines of coordinators that
        are not in force."""
        if self.line is line:
            peer, self.coordinator, self.line = line.peer, None, None
            self.on_lost(peer, error)

    def desert(self) -> None:
        """Leave the coordinator in force, which gives out no work, and do not follow it again for a while."""
        if self.line is not None:
            self._idlers.failed(self.line.peer)
            self._leave(self.line, f"gives out no work for {STALLED_S:.0f} s")

    def _leave(self, line: Line, fault: str) -> None:
        log.warning("coordinator %s %s", line.peer, fault)
        self.lost(line, PeerLost(f"coordinator {line.peer} {fault}", peer=line.peer))
        line.close()

    async def _watch_silence(self) -> None:
        """Leave a coordinator that is silent for SILENCE_S. It counts ticks, not seconds, since a suspended process hears
        nothing."""
        while True:
            await asyncio.sleep(TICK_S)
            self._silent_ticks += 1
            line = self.line
            if line is not None and self._silent_ticks * TICK_S >= SILENCE_S:
                self._deserters.failed(line.peer)
                self._leave(line, f"says nothing for {SILENCE_S:.0f} s")

    async def close(self) -> None:
        """Stop following. The coordinator whose line ends now is not blamed."""
        self.coordinator = self.line = None
        await self._tasks.close()


class LeadClaims:
    """Open conversations of peers that claim to lead the training: that of the coordinator which is followed, and at most
    MAX_CLAIMS others, one for each peer. Each of the others is kept for CLAIM_S seconds."""

    def __init__(self, following: Following) -> None:
        self._following = following
        self._channels: dict[Channel, None] = {}  # oldest first

    def add(self, channel: Channel) -> None:
        """Keep a conversation whose first LEAD has been answered, and close those beyond the limits."""
        self._channels = {kept: None for kept in self._channels if kept.open}
        idle = [kept for kept in self._channels if kept is not self._following.line]
        of_peer = [kept for kept in idle if kept.peer == channel.peer]
        oldest = idle[: max(0, len(idle) + 1 - MAX_CLAIMS)]
        for kept in {*of_peer, *oldest}:
            self._close(kept)
        self._channels[channel] = None
        asyncio.get_running_loop().call_later(CLAIM_S, self._expire, channel)

    def _expire(self, channel: Channel) -> None:
        """Close a conversation after its time. That of the coordinator which is followed stays, and is looked at again after
        CLAIM_S seconds."""
        if channel.open and channel is self._following.line:
            asyncio.get_running_loop().call_later(CLAIM_S, self._expire, channel)
        else:
            self._close(channel)

    def _close(self, channel: Channel) -> None:
        if self._channels.pop(channel, channel) is None and channel.open:
            channel.close(Error(ErrorCode.STALE))


WORTH_TELLING_S = 2.0  # shorter waits are normal
TOLD = 5
DOING = {
    FrameKind.LEAD: "to say what it holds",
    FrameKind.BEGIN: "to begin the run",
    FrameKind.RELEASE: "to say what it has counted",
    FrameKind.DISCARD: "to discard a step",
    FrameKind.REDUCE: "to average with its replicas",
    FrameKind.COMMIT: "to update",
    FrameKind.RESTORE: "to load a step",
    FrameKind.LEASE: "to bring back a microbatch",
}


def longest_waits(
    members: Iterable[WorkerHandle], leases: Iterable[OutstandingLease], failures: Failures, now_s: float
) -> tuple[Wait, ...]:
    """Return what the current step waits for: commands without an answer and peers in a pause, then microbatches under way. A
    microbatch may be at any place of its route, so all its peers are listed. Waits that began just now are left out. Each kind is
    sorted by time, the longest first, and MAX_WAITS are returned at most."""
    waits: list[Wait] = []
    for member in members:
        if member.refuses:
            waits.append(Wait(member.peer, FrameKind.FAILED, failures.pause_s(member.peer), *member.span))
        elif member.asked and now_s - member.asked[0].began_s >= WORTH_TELLING_S:
            command = member.asked[0]
            waits.append(Wait(member.peer, command.kind, now_s - command.began_s, *member.span))
        elif failures.rests(member.peer):
            waits.append(Wait(member.peer, 0, failures.pause_s(member.peer), *member.span))
    for record in leases:
        if now_s - record.issued_at_s >= WORTH_TELLING_S:
            waited_s = now_s - record.issued_at_s
            waits.append(Wait(record.trainer, FrameKind.LEASE, waited_s))
            waits += [Wait(peer, FrameKind.LEASE, waited_s, *span) for peer, span in record.route]
    once = {(wait.peer, wait.what): wait for wait in sorted(waits, key=lambda wait: wait.since_s)}
    return tuple(
        sorted(once.values(), key=lambda wait: (wait.what == FrameKind.LEASE, -wait.since_s, wait.peer))[:MAX_WAITS]
    )


def sentence(progress: ProgressReport) -> str:
    """Return a sentence about the waits, or an empty text if there are none worth reporting. It quotes no text of a peer, and names
    peers as `status` does, by the end of the id."""
    parts, units = [], sorted(progress.missing)
    if units:
        named = f"layers {', '.join(map(str, units[:8]))} have" if len(units) > 1 else f"layer {units[0]} has"
        parts.append(f"{named} no holder")
    parts += [_wait_text(wait) for wait in progress.waits[:TOLD]]
    return f"step {progress.step} waits: {'; '.join(parts)}" if parts else ""


def _wait_text(wait: Wait) -> str:
    if wait.what == FrameKind.WORK:
        return f"until peers are at the places where steps are shortest, {wait.since_s:.0f} s so far"
    peer = wait.peer[-8:]
    where = f" (layers {wait.start}-{wait.end - 1})" if wait.end > wait.start else ""
    if wait.what == FrameKind.FAILED:
        return f"for peer {peer}{where}, which cannot take up the run: if its version is older, update swarmnode there"
    doing = DOING.get(FrameKind(wait.what)) if wait.what in FrameKind._value2member_map_ else None
    if doing is None:
        return f"peer {peer}{where} failed and is asked again in {wait.since_s:.0f} s"
    return f"for peer {peer}{where} {doing}, {wait.since_s:.0f} s so far"
