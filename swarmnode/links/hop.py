"""Hop: the edge from one stage of a session to the next, and the recovery that moves it to another peer.

The client's edge to the first stage and a stage's edge to the next are both Hops, so there is one mechanism of recovery. The sender
keeps a journal of the encoded inputs that it sent. When the session moves to a newer epoch, the (new) peer says how many positions
it holds, and the sender sends the rest again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
from msgspec.structs import replace

from swarmnode.codec.body import Body
from swarmnode.codec.frames import Frame
from swarmnode.codec.messages import End, Error, Input, Open, Ready, Truncate
from swarmnode.codec.tensors import PLAIN_CODECS
from swarmnode.errors import PeerError, PeerLost, refusal
from swarmnode.ledger import Reservation
from swarmnode.links.switchboard import Channel, Switchboard
from swarmnode.net.clock import Deadline
from swarmnode.net.interfaces import Buffer, PeerId

ENTRY_BYTES = 768  # of Python's objects around one entry of a journal
OPENING = Deadline(floor_s=2.0, ceiling_s=10.0, slack=8.0)  # for READY, which a peer sends before it computes anything


class Entry(msgspec.Struct, frozen=True):
    """Encoded positions [start, start + count) of a session, for sending. A msgspec struct for speed, like Frame."""

    start: int
    count: int
    body: Input
    payload: Sequence[Buffer]
    truncate: Truncate | None = None  # sent before it

    @property
    def end(self) -> int:
        """Position after the last."""
        return self.start + self.count

    @property
    def payload_bytes(self) -> int:
        """Bytes of the encoded inputs."""
        return sum(map(len, self.payload))


class JournalGap(PeerLost):
    """Positions that a peer lacks are not in the journal, as another peer had sent them: they must be computed again."""


class Hop:
    """Edge from one stage of a session to the next: a journal, and a channel for each epoch.

    `on_frame` gets all frames of the current channel except READY, ERROR and END. `on_fault(error)` is called once per epoch if the
    peer is lost or refuses after `open` has succeeded. `reservation` counts the journal; None if its memory is reserved elsewhere.
    """

    def __init__(
        self,
        switchboard: Switchboard,
        on_frame: Callable[[Frame, Body], None],
        on_fault: Callable[[PeerError], None],
        reservation: Reservation | None = None,
    ) -> None:
        self._switchboard = switchboard
        self._on_frame = on_frame
        self._on_fault = on_fault
        self._reservation = reservation
        self.journal: list[Entry] = []  # entries that may have to be sent again
        self.journal_bytes = 0  # of their payloads
        self.begin = (
            0  # first position in the journal: earlier ones were sent by another peer, whose cache was taken over
        )
        self.end = 0  # positions journalled
        self.had = 0  # positions that the current peer held when it was bound; later ones were sent to it
        self.truncations = 0  # number of the last truncation
        self._turn = 0  # of the last entry; an entry of a higher one takes guesses back
        self._replayed = 0  # entries of the journal that were sent by the replay in progress
        self._channel: Channel | None = None
        self._ready: asyncio.Future[int] | None = None
        self._error: PeerError | None = None
        self._live = False
        self._attempt = 0  # counts bindings: callbacks of an earlier one are ignored

    def __repr__(self) -> str:
        where = f"to {self._channel.peer}" if self._channel else "unbound"
        return f"<Hop {where} {'live' if self._live else 'waiting'} journal of {self.end} positions, {self.journal_bytes} bytes>"

    @property
    def peer(self) -> PeerId | None:
        """Peer of the next stage; None while the hop is not bound."""
        return self._channel.peer if self._channel else None

    @property
    def rtt_s(self) -> float | None:
        """Round trip to the current peer in seconds; None if it is not bound or not measured."""
        return self._channel.rtt_s if self._channel else None

    async def open(self, peer: PeerId, body: Open, text: Buffer = b"") -> None:
        """Bind the hop to `peer` for the epoch of `body`, sent with the payload `text`: wait for READY, send the positions that the
        peer lacks, and go live.

        Raises PeerLost, PeerRefused or NetworkDown; the hop is then unbound and keeps its journal. Raises JournalGap if the peer
        lacks positions that another peer sent before this one.
        """
        former = self._release()
        try:
            await self._bind(self._attempt, peer, body, text)
        finally:
            if former is not None:
                former.close()  # only now: before the OPEN, END would free the cache of a peer that stays

    async def _bind(self, attempt: int, peer: PeerId, body: Open, text: Buffer) -> None:
        """Bind the hop to `peer` as `open` does. Raises PeerLost also if READY does not come in time; another session's payload may
        be ahead of it."""
        channel = await self._switchboard.call(
            peer, lambda frame, body: self._receive(attempt, frame, body), lambda error: self._lost(attempt, error)
        )
        if attempt != self._attempt:
            channel.close()
            raise _superseded(peer)
        ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._ready, self._channel, self._error = ready, channel, None
        try:
            channel.send(body, payload=(text,) if text else ())
            loop = asyncio.get_running_loop()
            began_s = loop.time()
            while not ready.done():  # READY tells the positions that the peer holds
                timeout_s = OPENING.wait_s(rtt_s=None if channel.moving else channel.rtt_s)
                left_s = began_s + timeout_s - loop.time()
                if left_s <= 0:
                    raise PeerLost(f"peer {channel.peer} did not get ready within {timeout_s:.1f} s", peer=channel.peer)
                # a new link's round trip is not yet known
                await asyncio.wait([ready], timeout=min(left_s, OPENING.floor_s))
            have = self.had = ready.result()
            self._replayed = 0
            self._check_bound(attempt, channel)  # an error may have arrived together with READY
            # A peer that missed a truncation holds positions that are not in the journal any more.
            lacking = min([have, *(entry.start for entry in self.journal if entry.truncate is not None)])
            if lacking < self.begin:
                raise JournalGap(f"{channel.peer} has {lacking} positions; this journal begins at {self.begin}")
            while self._replayed < len(self.journal):  # the journal may grow, or be cut, while the link drains
                entry = self.journal[self._replayed]
                self._replayed += 1
                if entry.end > lacking:
                    _send(channel, entry)
                    await channel.drain()
                    self._check_bound(attempt, channel)
            self._live = True
        except (PeerError, asyncio.CancelledError):
            if attempt == self._attempt:
                self.unbind()
            raise

    def _check_bound(self, attempt: int, channel: Channel) -> None:
        if attempt != self._attempt:
            raise _superseded(channel.peer)
        if self._error is not None:
            raise self._error

    def send(self, entry: Entry, *, at_once: bool = False) -> None:
        """Journal an entry and, while the hop is live, send it; `at_once` if no other frame goes with it. Entries already
        journalled are ignored."""
        if self.record(entry) and self._live and self._channel is not None:
            try:
                _send(self._channel, entry, at_once=at_once)
            except PeerLost as error:
                self._lost(self._attempt, error)

    def record(self, entry: Entry) -> bool:
        """Journal an entry without sending it (the peer gets it in another way). Returns False if its positions were journalled
        already."""
        if entry.truncate is not None and entry.truncate.number > self.truncations:
            self._truncate(entry.truncate)
        if entry.body.turn > self._turn:
            self.retract(entry.start)
            self._turn = entry.body.turn
        if entry.end <= self.end:
            return False
        self.journal.append(entry)
        self.journal_bytes += entry.payload_bytes
        self.end = entry.end
        self._count()
        return True

    def begin_at(self, position: int, truncations: int) -> None:
        """Begin an empty journal at `position`, after `truncations` truncations: another peer has sent the positions before."""
        self.begin = self.end = position
        self.truncations = truncations

    def lacks_for(self, peer: PeerId) -> bool:
        """Return whether `peer`, unless it is bound already, may need positions before those of the journal."""
        return self.begin > 0 and peer != self.peer

    def begin_as(self, other: Hop, end: int) -> int:
        """Journal the first positions of another session's edge without sending them, sharing their bytes; return the number of
        positions journalled.

        These are at most `end`; an entry that cannot be divided is taken whole or not at all.
        """
        for entry in other.journal:
            is_cut = entry.count < entry.body.tensor.shape[1] or entry.end > end
            if entry.start >= end or entry.start > self.end or (is_cut and not _is_divisible(entry)):
                break
            self.record(replace(entry if entry.end <= end else _front(entry, end - entry.start), truncate=None))
        return self.end

    def cut(self, truncate: Truncate) -> None:
        """Forget the positions after the truncation; the peer learns of it in another way. Ignored if it is not newer than the
        last."""
        if truncate.number > self.truncations and truncate.to < self.end:
            self._truncate(truncate)

    def retract(self, to: int) -> None:
        """Forget the positions from `to` on, which were guesses; the peer learns of it from the turn of the next entry."""
        if to < self.end:
            self._cut_journal(to)

    def settle(self, to: int) -> None:
        """Forget the positions from `to` on, and keep the earlier ones as what they are: no guesses. The peer is bound anew."""
        self.retract(to)
        self.journal = [
            replace(entry, body=replace(entry.body, guessed=0)) if entry.body.guessed else entry
            for entry in self.journal
        ]

    def truncation(self, to: int) -> Truncate:
        """Return the next truncation, for an entry that begins at position `to`."""
        return Truncate(self.truncations + 1, to)

    def _truncate(self, truncate: Truncate) -> None:
        """Forget the positions after the truncation; of an entry across it the front stays."""
        self.truncations = truncate.number
        self._cut_journal(truncate.to)

    def _cut_journal(self, to: int) -> None:
        self.begin, self.end = min(self.begin, to), to
        self.journal = list(until(self.journal, to))
        self._replayed = min(self._replayed, len(self.journal))
        self.journal_bytes = sum(entry.payload_bytes for entry in self.journal)
        self._count()

    def _count(self) -> None:
        if self._reservation is not None:
            self._reservation.count(self.journal_bytes + ENTRY_BYTES * len(self.journal))

    def tell(self, body: Body) -> None:
        """Send a frame that needs no journal; dropped if the hop is not bound."""
        if self._channel is not None and self._channel.open:
            self._channel.send(body)

    def unbind(self, *, after_s: float = 0.0) -> None:
        """Leave the current peer in order, and give up an `open` in progress; the journal stays for the next peer.

        The peer hears of it after `after_s` seconds. Until then another hop may take the place of this one.
        """
        channel = self._release()
        if channel is not None and after_s:
            asyncio.get_running_loop().call_later(after_s, channel.close)
        elif channel is not None:
            channel.close()

    def _release(self) -> Channel | None:
        """Forget the binding, or the `open` in progress, and return its channel for the caller to close; None if there was none."""
        channel, self._channel = self._channel, None
        self._attempt += 1
        self._live = False
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(_superseded(channel.peer if channel else None))
            self._ready.exception()  # marks it as retrieved: `open` may have been given up
        return channel

    def _receive(self, attempt: int, frame: Frame, body: Body) -> None:
        if attempt != self._attempt or self._channel is None:
            return
        if isinstance(body, Ready):
            if self._ready is not None and not self._ready.done():
                self._ready.set_result(body.have)
        elif isinstance(body, Error):
            self._lost(attempt, refusal(body.code, retry_s=body.retry_s, peer=self._channel.peer))
        elif isinstance(body, End):
            self._lost(attempt, PeerLost(f"peer {self._channel.peer} ended the session", peer=self._channel.peer))
        else:
            self._on_frame(frame, body)

    def _lost(self, attempt: int, error: PeerError) -> None:
        if attempt != self._attempt:
            return
        was_live, self._live = self._live, False
        self._error = error
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(error)
        elif was_live:
            self._on_fault(error)


def until(entries: Iterable[Entry], to: int) -> Iterator[Entry]:
    """Yield the entries before position `to`; of an entry across it the front."""
    for entry in entries:
        if entry.start < to:
            yield entry if entry.end <= to else _front(entry, to - entry.start)


def _front(entry: Entry, count: int) -> Entry:
    """Return the entry with its first `count` positions. The payload stays whole if these are not its first bytes; then the entry
    sent after it cuts it."""
    if not _is_divisible(entry):
        return replace(entry, count=count)
    info = entry.body.tensor
    whole = b"".join(entry.payload)
    shape = (1, count, *info.shape[2:])
    body = replace(entry.body, tensor=replace(info, shape=shape))
    return replace(entry, count=count, body=body, payload=(whole[: len(whole) * count // info.shape[1]],))


def _is_divisible(entry: Entry) -> bool:
    """Return whether the entry can be cut between positions: its first positions are its first bytes."""
    info = entry.body.tensor
    return info.shape[0] == 1 and info.codec in PLAIN_CODECS


def _send(channel: Channel, entry: Entry, *, at_once: bool = False) -> None:
    if entry.truncate is not None:
        channel.send(entry.truncate)
    channel.send(entry.body, seq=entry.start, payload=entry.payload, at_once=at_once)


def _superseded(peer: PeerId | None) -> PeerLost:
    return PeerLost(f"the session has moved on from peer {peer}", peer=peer)
