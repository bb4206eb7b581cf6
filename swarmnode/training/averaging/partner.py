"""Partner: another member in one attempt of an all-reduce, the patience with its silence, and pulls that arrive before the attempt.

Chunks travel only on request. A receiver opens a conversation with PULL, which grants a number of chunks; the sender answers with a
PART for each; every used chunk is granted again. So no chunk arrives early, and memory is bounded by the grants: a PART beyond them
is an error of its sender.

Contributions and sums are granted separately. Sums are always taken at once, while contributions wait until all have sent theirs
and the earlier sums are gone: in a common window they would block the sums for ever.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from swarmnode.codec.body import Body
from swarmnode.codec.frames import Frame
from swarmnode.codec.messages import End, Error
from swarmnode.codec.training_messages import MAX_MEMBERS, MAX_PULLED, Failed, Part, Pull, Waiting
from swarmnode.compute.training.averaging.parts import LARGEST_PART, Encoded
from swarmnode.errors import ErrorCode, PeerError, PeerLost, ProtocolError
from swarmnode.links.switchboard import Channel, Switchboard
from swarmnode.net.interfaces import Buffer, PeerId

MAX_CHUNK_BYTES = 4 * LARGEST_PART + 4096  # no codec makes a part larger
MAX_EARLY = 2 * MAX_MEMBERS  # pulls of strangers included: the members are not known yet


class AttemptId(NamedTuple):
    """Id of an attempt at an all-reduce."""

    term: int
    step: int
    attempt: int
    run: bytes  # the run's id

    @property
    def order(self) -> tuple[int, int]:
        """Place among all attempts. A coordinator numbers its attempts through, while steps begin anew with each run."""
        return self.term, self.attempt


def attempt_of(body: Pull) -> AttemptId:
    """Return the id of the all-reduce attempt (term, step, attempt and run) that a PULL message belongs to."""
    return AttemptId(body.term, body.step, body.attempt, body.run)


@dataclass(frozen=True)
class PartChunk:
    """Message of an all-reduce with a part of a vector: the header, and the encoded values."""

    head: Part
    payload: Buffer

    @property
    def encoded(self) -> Encoded:
        """The values of the part as sent: the descriptor of their encoding, and the payload."""
        return self.head.values[0], self.payload


@dataclass(frozen=True)
class Patience:
    """The time in seconds that a peer may do nothing. `still_s` applies while it is silent, `excused_s` while it waits for others
    or its chunks are on their way. By then the peer that holds it up has been found, and even a slow link has carried a chunk."""

    still_s: float
    excused_s: float


class Progress:
    """The latest actions of a peer in an attempt, and the waiting for it. Only chunks and grants count as actions: a peer whose
    links answer PING may still stand still.

    `patience()` is called at every wait, since links are measured meanwhile; `moving()` returns whether chunks are on their way.
    """

    def __init__(self, peer: PeerId, patience: Callable[[], Patience], moving: Callable[[], bool]) -> None:
        self.peer = peer
        self.failure: PeerError | None = None
        self.waiting_since_s: float | None = None  # since when this node waits for it
        self._patience = patience
        self._moving = moving
        self._clock = asyncio.get_running_loop().time
        self._acted_at_s = self._excused_at_s = self._clock()
        self._waiters: list[asyncio.Future[None]] = []  # in order of arrival

    def acted(self) -> None:
        """Record that the partner sent or granted a part, so that its patience starts anew."""
        self._acted_at_s = self._excused_at_s = self._clock()
        self._wake()

    def excused(self) -> None:
        """Record that the partner has said that it waits for other members, so that its silence is no fault."""
        self._excused_at_s = self._clock()

    def fail(self, error: PeerError) -> None:
        """Note that the peer has failed. The first error is kept."""
        self.failure = self.failure or error
        self._wake()

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until the peer makes `condition` true; `what` describes the wait. Raises the peer's failure, or PeerLost if
        it stands still."""
        began_s = self._clock()
        while not condition():
            if self.failure is not None:
                raise self.failure
            if self._moving():
                self.excused()
            patience = self._patience()
            still_s = max(began_s, self._excused_at_s) + patience.still_s
            limit_s = min(still_s, max(began_s, self._acted_at_s) + patience.excused_s)
            if self._clock() >= limit_s:
                stood_s = self._clock() - max(began_s, self._acted_at_s)
                raise PeerLost(f"peer {self.peer} stands still: {what} for {stood_s:.1f} s", peer=self.peer)
            self.waiting_since_s = began_s
            try:
                # Wait until the peer acts or fails, or until `until_s`.
                future = asyncio.get_running_loop().create_future()
                self._waiters.append(future)
                try:
                    await asyncio.wait([future], timeout=max(0.0, limit_s - self._clock()))
                finally:
                    self._waiters.remove(future)
            finally:
                self.waiting_since_s = None
            if self._clock() - limit_s > self._patience().still_s / 2:
                began_s = self._clock()  # this process slept (suspended, or a blocked loop), not the peer

    def _wake(self) -> None:
        for future in self._waiters:
            if not future.done():
                future.set_result(None)


class Partner:
    """Partner in one attempt: another member. It exists from the start of the attempt; `close` ends both conversations.
    Methods raise its failure."""

    def __init__(self, own: PeerId, peer: PeerId, attempt: AttemptId, patience: Callable[[], Patience]) -> None:
        self.peer = peer
        self.progress = Progress(peer, patience, self._is_moving)
        self._own = own
        self._attempt = attempt
        self._incoming: Channel | None = None  # our pulls
        self._granted = {False: 0, True: 0}  # chunks that it may still send, by `agreed`
        self._chunks: dict[bool, deque[PartChunk]] = {False: deque(), True: deque()}  # by `agreed`, in order of arrival
        self._outgoing: Channel | None = None  # its pulls
        self._asked_for = {False: 0, True: 0}  # chunks that we may still send
        self._sending = asyncio.Lock()

    # -- receiving

    async def pull(self, switchboard: Switchboard, window: int) -> None:
        """Ask the partner for chunks, at most `window` of each kind on the way or unused here. Raises PeerLost,
        PeerRefused, NetworkDown."""
        channel = await switchboard.call(self.peer, self._receive_incoming, self.progress.fail)
        channel.send(Pull(*self._attempt, window, window))
        self._incoming, self._granted = channel, {False: window, True: window}

    async def next(self, head: Part) -> PartChunk:
        """Return the next contribution or sum, after waiting for it. Raises ProtocolError if it is not the one of `head`."""
        chunks = self._chunks[head.agreed]
        await self.progress.until(lambda: bool(chunks), "it has not sent a part")
        chunk = chunks.popleft()
        if msgspec.structs.replace(chunk.head, values=()) != head:
            raise ProtocolError(f"it sent {chunk.head} instead of {head}", peer=self.peer)
        if len(chunk.head.values) != 1:
            raise ProtocolError(f"it sent a part of {len(chunk.head.values)} vectors instead of one", peer=self.peer)
        return chunk

    def grant_next(self, *, agreed: bool) -> None:
        """Grant the partner one more message, after one was used. `agreed`: a message with a sum instead of a contribution."""
        if self._incoming is not None and self._incoming.open:
            self._granted[agreed] += 1
            self._incoming.send(Pull(*self._attempt, int(not agreed), int(agreed)))

    def _receive_incoming(self, frame: Frame, body: Body) -> None:
        if isinstance(body, Part):
            self._receive_part(body, frame.payload)
        else:
            self._receive_other(body, self._incoming)

    def _receive_part(self, head: Part, payload: Buffer) -> None:
        granted = self._granted[head.agreed]
        if not granted or len(payload) > MAX_CHUNK_BYTES:
            self._break_rules(f"a part of {len(payload)} bytes where {granted} were granted", self._incoming)
            return
        self._granted[head.agreed] = granted - 1
        self._chunks[head.agreed].append(PartChunk(head, payload))
        self.progress.acted()

    # -- sending

    def pulled(self, channel: Channel, body: Pull) -> None:
        """Take the partner's request for chunks. A second request replaces the first conversation."""
        if self._outgoing is not None:
            self._outgoing.close(Error(ErrorCode.STALE))
        self._outgoing, self._asked_for = channel, {False: 0, True: 0}
        channel.on_frame = lambda _frame, body: self._receive_outgoing(channel, body)
        channel.on_lost = self.progress.fail
        self._grant(body)

    async def push(self, head: Part, encoded: Encoded) -> None:
        """Send a chunk, after waiting for its request, and wait until the link has taken it."""
        await self.progress.until(lambda: self._asked_for[head.agreed] > 0, "it has not taken a part")
        channel = self._outgoing
        assert channel is not None
        self._asked_for[head.agreed] -= 1
        async with self._sending:  # one after another, so that chunks wait here and not in the link's queue
            channel.send(msgspec.structs.replace(head, values=(encoded[0],)), payload=[encoded[1]])
            await channel.drain()

    def _receive_outgoing(self, channel: Channel, body: Body) -> None:
        if channel is not self._outgoing:
            return
        if isinstance(body, Pull) and attempt_of(body) == self._attempt:
            self._grant(body)
        elif isinstance(body, End):  # it has all that it needs; its own chunks may still be on their way
            self._outgoing, self._asked_for = None, {False: 0, True: 0}
        else:
            self._receive_other(body, channel)

    def _grant(self, body: Pull) -> None:
        self._asked_for[False] += body.contributions
        self._asked_for[True] += body.sums
        if max(self._asked_for.values()) > MAX_PULLED:
            self._break_rules("it asks for more chunks than allowed", self._outgoing)
        self.progress.acted()

    # -- both directions

    def _receive_other(self, body: Body, channel: Channel | None) -> None:
        if isinstance(body, Waiting) and body.run == self._attempt.run:
            self.progress.excused()
        elif isinstance(body, Failed) and body.peer not in ("", self._own):
            self.progress.fail(PeerLost(f"replica {self.peer} lost replica {body.peer}", peer=body.peer))
        elif isinstance(body, Failed | End | Error):
            blamed = self.peer if isinstance(body, Failed) and body.peer == self._own else None
            self.progress.fail(PeerLost(f"replica {self.peer} gave the all-reduce up", peer=blamed))
        else:
            self._break_rules(f"{type(body).__name__} is not allowed in an all-reduce", channel)

    def _break_rules(self, text: str, channel: Channel | None) -> None:
        """Fail the partner and close this conversation with MALFORMED; the rest of the link goes on."""
        self.progress.fail(ProtocolError(text, peer=self.peer))
        if channel is not None:
            channel.close(Error(ErrorCode.MALFORMED))

    def excuse(self, waits_for: PeerId) -> None:
        """Tell the partner that this node waits for the member `waits_for`, so that its silence is no fault."""
        channel = self._incoming or self._outgoing
        if channel is not None and channel.open:
            channel.send(Waiting(self._attempt.run, waits_for))

    def _is_moving(self) -> bool:
        return any(channel is not None and channel.moving for channel in (self._incoming, self._outgoing))

    def close(self, error: BaseException | None) -> None:
        """End both conversations. Without an error the partner may still take the remaining chunks."""
        last_word = None if error is None else _last_word(error, self._attempt)
        if self._incoming is not None:
            self._incoming.close(last_word)
        if self._outgoing is not None and last_word is not None:
            self._outgoing.close(last_word)


def _last_word(error: BaseException, attempt: AttemptId) -> Body:
    if isinstance(error, PeerError) and error.peer is not None:
        return Failed(attempt.attempt, error.peer, ErrorCode.PEER_LOST, run=attempt.run)
    return Error(ErrorCode.STALE)


class _EarlyPull(NamedTuple):
    channel: Channel
    body: Pull
    attempt: AttemptId


class EarlyPulls:
    """Pulls that arrive before our own REDUCE: the newest conversation of each peer, oldest first. The oldest are closed if there
    are too many. No chunks are held: an early peer waits."""

    def __init__(self) -> None:
        self._pulls: dict[PeerId, _EarlyPull] = {}

    def __len__(self) -> int:
        return len(self._pulls)

    def store_pull(self, channel: Channel, body: Pull) -> None:
        """Keep a PULL, a request for parts, of an all-reduce attempt that has not begun here yet."""
        known = self._pulls.pop(channel.peer, None)
        if known is not None:
            known.channel.close(Error(ErrorCode.STALE))
        if len(self._pulls) >= MAX_EARLY:
            self._pulls.pop(next(iter(self._pulls))).channel.close(Error(ErrorCode.BUSY))
        self._pulls[channel.peer] = pull = _EarlyPull(channel, body, attempt_of(body))
        channel.on_frame = lambda _frame, body: self._receive(pull, body)
        channel.on_lost = lambda _error: self._forget(pull)

    def pop_pull(self, peer: PeerId, attempt: AttemptId) -> tuple[Channel, Pull] | None:
        """Remove and return the conversation of `peer` and its PULL if it is of `attempt`; else return None."""
        pull = self._pulls.get(peer)
        if pull is None or pull.attempt != attempt:
            return None
        del self._pulls[peer]
        return pull.channel, pull.body

    def drop_until(self, attempt: AttemptId) -> None:
        """Close the pulls of attempts up to this one, which have begun or are over."""
        for peer, pull in list(self._pulls.items()):
            if pull.attempt.order <= attempt.order:
                del self._pulls[peer]
                pull.channel.close(Error(ErrorCode.STALE))

    def _receive(self, pull: _EarlyPull, body: Body) -> None:
        """Handle a further message of an early conversation: before the first parts only WAITING is allowed."""
        if not isinstance(body, Waiting):
            self._forget(pull)
            pull.channel.close(Error(ErrorCode.MALFORMED))

    def _forget(self, pull: _EarlyPull) -> None:
        if self._pulls.get(pull.channel.peer) is pull:
            del self._pulls[pull.channel.peer]
