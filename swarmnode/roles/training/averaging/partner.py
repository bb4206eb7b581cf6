"""Partner: another member in one attempt of an all-reduce; the chunks that come from it, and those that go to it.

Chunks travel only when they were asked for. Who wants some opens a conversation with PULL, which grants so many; the other answers
with PART, one for each; each that is used up is granted anew. So nothing comes early, and what lies here is bounded by what we
granted: a PART beyond it is an error of its sender's. Contributions and sums are granted apart: sums are always taken at once,
while contributions wait until all have sent theirs and the sums before are gone: in one window they would hold those up for ever.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from swarmnode.codec.averaging_messages import Part, Pull, Waiting
from swarmnode.codec.frames import Frame
from swarmnode.codec.messages import Body, End, Error
from swarmnode.codec.training_fields import MAX_PULLED
from swarmnode.codec.training_messages import Failed
from swarmnode.compute.training.averaging.parts import LARGEST_PART, Encoded
from swarmnode.errors import ErrorCode, PeerError, PeerLost, ProtocolError
from swarmnode.net.interfaces import Buffer, PeerId
from swarmnode.net.links.switchboard import Channel, Switchboard
from swarmnode.roles.training.averaging.progress import Patience, Progress

MAX_CHUNK_BYTES = 4 * LARGEST_PART + 4096  # no codec makes more of a part


class AttemptId(NamedTuple):
    """Which attempt to reduce: it grows from each to the next."""

    term: int
    step: int
    attempt: int
    run: bytes  # the run's id


def attempt_of(body: Pull) -> AttemptId:
    """Which attempt it is about."""
    return AttemptId(body.term, body.step, body.attempt, body.run)


@dataclass(frozen=True)
class PartChunk:
    """A part of a vector that has come."""

    head: Part
    payload: Buffer

    @property
    def encoded(self) -> Encoded:
        """Its one vector's descriptor and payload."""
        return self.head.values[0], self.payload


class Partner:
    """Made when the attempt begins; `close` ends both conversations. Its methods raise what made the partner fail."""

    def __init__(self, own: PeerId, peer: PeerId, attempt: AttemptId, patience: Callable[[], Patience]) -> None:
        self.peer = peer
        self.progress = Progress(peer, patience, self._is_moving)
        self._own = own
        self._attempt = attempt
        self._incoming: Channel | None = None  # on which we pull
        self._granted = {False: 0, True: 0}  # chunks that it may still send, by `agreed`
        self._chunks: dict[bool, deque[PartChunk]] = {
            False: deque(),
            True: deque(),
        }  # by `agreed`, in the order in which they came
        self._outgoing: Channel | None = None  # on which it pulls
        self._outstanding_leases = {False: 0, True: 0}  # chunks that we may still send
        self._sending = asyncio.Lock()

    def __repr__(self) -> str:
        waiting = sum(map(len, self._chunks.values()))
        granted, outstanding_leases = (f"{of[False]} + {of[True]}" for of in (self._granted, self._outstanding_leases))
        return f"<Partner {self.peer}: {waiting} chunks here, {granted} granted, {outstanding_leases} may be sent>"

    # -- what comes

    async def pull(self, switchboard: Switchboard, window: int) -> None:
        """Ask it for chunks: so many of each kind may be on the way or wait here. Raises PeerLost, PeerRefused, NetworkDown."""
        channel = await switchboard.call(self.peer, self._hear_incoming, self.progress.fail)
        channel.send(Pull(*self._attempt, window, window))
        self._incoming, self._granted = channel, {False: window, True: window}

    async def next(self, head: Part) -> PartChunk:
        """The next contribution, or agreed part. Raises ProtocolError where it is not the one of this head."""
        chunks = self._chunks[head.agreed]
        await self.progress.until(lambda: bool(chunks), "a part is waited for")
        chunk = chunks.popleft()
        if msgspec.structs.replace(chunk.head, values=()) != head:
            raise ProtocolError(f"{chunk.head} came where {head} was due", peer=self.peer)
        if len(chunk.head.values) != 1:
            raise ProtocolError(f"a part of {len(chunk.head.values)} vectors", peer=self.peer)
        return chunk

    def taken(self, *, agreed: bool) -> None:
        """A chunk is used up: it may send another one."""
        if self._incoming is not None and self._incoming.open:
            self._granted[agreed] += 1
            self._incoming.send(Pull(*self._attempt, int(not agreed), int(agreed)))

    def _hear_incoming(self, frame: Frame, body: Body) -> None:
        if isinstance(body, Part):
            self._hear_part(body, frame.payload)
        else:
            self._hear_other(body, self._incoming)

    def _hear_part(self, head: Part, payload: Buffer) -> None:
        granted = self._granted[head.agreed]
        if not granted or len(payload) > MAX_CHUNK_BYTES:
            self._break_rules(f"a part of {len(payload)} bytes where {granted} were granted", self._incoming)
            return
        self._granted[head.agreed] = granted - 1
        self._chunks[head.agreed].append(PartChunk(head, payload))
        self.progress.acted()

    # -- what goes

    def pulled(self, channel: Channel, body: Pull) -> None:
        """It asks for chunks. Who asks a second time gives up the first conversation."""
        if self._outgoing is not None:
            self._outgoing.close(Error(ErrorCode.STALE))
        self._outgoing, self._outstanding_leases = channel, {False: 0, True: 0}
        channel.on_frame = lambda _frame, body: self._hear_outgoing(channel, body)
        channel.on_lost = self.progress.fail
        self._grant(body)

    async def push(self, head: Part, encoded: Encoded) -> None:
        """Send a chunk as soon as it is asked for, and wait until the link has taken it."""
        await self.progress.until(lambda: self._outstanding_leases[head.agreed] > 0, "it takes nothing")
        channel = self._outgoing
        assert channel is not None
        self._outstanding_leases[head.agreed] -= 1
        async with self._sending:  # one after another: what waits to be sent waits here, and not in the link's queue
            channel.send(msgspec.structs.replace(head, values=(encoded[0],)), payload=[encoded[1]])
            await channel.drain()

    def _hear_outgoing(self, channel: Channel, body: Body) -> None:
        if channel is not self._outgoing:
            return
        if isinstance(body, Pull) and attempt_of(body) == self._attempt:
            self._grant(body)
        elif isinstance(body, End):  # it has all that it needs; what we wait for may still be on its way
            self._outgoing, self._outstanding_leases = None, {False: 0, True: 0}
        else:
            self._hear_other(body, channel)

    def _grant(self, body: Pull) -> None:
        self._outstanding_leases[False] += body.contributions
        self._outstanding_leases[True] += body.sums
        if max(self._outstanding_leases.values()) > MAX_PULLED:
            self._break_rules("it pulls more than it can have room for", self._outgoing)
        self.progress.acted()

    # -- both

    def _hear_other(self, body: Body, channel: Channel | None) -> None:
        if isinstance(body, Waiting) and body.run == self._attempt.run:
            self.progress.excused()
        elif isinstance(body, Failed) and body.peer not in ("", self._own):
            self.progress.fail(PeerLost(f"replica {self.peer} lost replica {body.peer}", peer=body.peer))
        elif isinstance(body, Failed | End | Error):
            blamed = self.peer if isinstance(body, Failed) and body.peer == self._own else None
            self.progress.fail(PeerLost(f"replica {self.peer} gave the all-reduce up", peer=blamed))
        else:
            self._break_rules(f"a {type(body).__name__} has no place in an all-reduce", channel)

    def _break_rules(self, text: str, channel: Channel | None) -> None:
        """What it sent is told to be wrong; nothing else of the link is disturbed."""
        self.progress.fail(ProtocolError(text, peer=self.peer))
        if channel is not None:
            channel.close(Error(ErrorCode.MALFORMED))

    def excuse(self, waits_for: PeerId) -> None:
        """Tell it that we are here, and whom we wait for."""
        channel = self._incoming or self._outgoing
        if channel is not None and channel.open:
            channel.send(Waiting(self._attempt.run, waits_for))

    def _is_moving(self) -> bool:
        return any(channel is not None and channel.moving for channel in (self._incoming, self._outgoing))

    def close(self, error: BaseException | None) -> None:
        """End both conversations: all is done, or the attempt failed."""
        last_word = None if error is None else _last_word(error, self._attempt)
        if self._incoming is not None:
            self._incoming.close(last_word)
        if self._outgoing is not None and last_word is not None:
            self._outgoing.close(last_word)


def _last_word(error: BaseException, attempt: AttemptId) -> Body:
    if isinstance(error, PeerError) and error.peer is not None:
        return Failed(attempt.attempt, error.peer, ErrorCode.PEER_LOST, run=attempt.run)
    return Error(ErrorCode.STALE)
