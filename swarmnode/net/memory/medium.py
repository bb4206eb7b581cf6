"""Paths between the peers of a fake world: latency, rate and loss, and peers that hang.

Streams of the fake network: two pipes, whose bytes arrive at a time that the world chooses.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from swarmnode.errors import PeerLost
from swarmnode.net.fair_share import CountedStream
from swarmnode.net.interfaces import Buffer, PeerId, Record

HIGH_WATER_BYTES = 1 << 20
PIECE_BYTES = 1 << 16

Deliver = Callable[["Pipe", int], None]
"""Function of (pipe, bytes): the world calls the pipe's `arrive` once for each call, in order, when the bytes arrive."""


class Pipe:
    """Direction of a simulated stream: the bytes on their way from `source` to `target`."""

    def __init__(self, source: PeerId, target: PeerId, deliver: Deliver) -> None:
        self.source = source
        self.target = target
        self.unread_bytes = 0  # on the way, or arrived and not read
        self.last_arrival_s = 0.0  # of the bytes sent last; later ones do not overtake them
        self.ended = False
        self.broken = False
        self._deliver = deliver
        self._travelling: deque[bytes] = deque()
        self._arrived: deque[memoryview] = deque()
        self._changed: dict[asyncio.Future[None], None] = {}  # waiting calls, the oldest first

    def send(self, data: bytes) -> None:
        """Send `data` to the other end; empty data marks the end of the stream."""
        self._travelling.append(data)
        self.unread_bytes += len(data)
        self._deliver(self, len(data))

    def arrive(self) -> None:
        """Let the oldest bytes on the way arrive at the receiver."""
        data = self._travelling.popleft()
        if data:
            self._arrived.append(memoryview(data))
            self._wake()
        else:
            self.end()

    def end(self) -> None:
        """End the pipe after the bytes that have arrived."""
        self.ended = True
        self._wake()

    def break_off(self) -> None:
        """Break the pipe: arrived bytes are dropped, and a read raises PeerLost."""
        self.broken = True
        self._arrived.clear()
        self._wake()

    async def read_into(self, buffer: memoryview) -> int:
        """Wait for bytes, put as many as fit into `buffer` and return their number; 0 at the end. Raises PeerLost if the pipe is
        broken."""
        while not self._arrived:
            if self.broken:
                raise PeerLost(f"the stream to peer {self.source} was reset", peer=self.source)
            if self.ended:
                return 0
            await self._change()
        data = self._arrived.popleft()
        count = min(len(data), len(buffer))
        buffer[:count] = data[:count]
        if count < len(data):
            self._arrived.appendleft(data[count:])
        self.unread_bytes -= count
        self._wake()
        return count

    async def drained(self) -> None:
        """Wait until at most HIGH_WATER_BYTES are unread, or the pipe is broken."""
        while self.unread_bytes > HIGH_WATER_BYTES and not self.broken:
            await self._change()

    async def _change(self) -> None:
        future = asyncio.get_running_loop().create_future()
        self._changed[future] = None
        try:
            await future
        finally:
            del self._changed[future]

    def _wake(self) -> None:
        for future in self._changed:
            if not future.done():
                future.set_result(None)


class FakeStream(CountedStream):
    """End of a simulated stream at one peer, made of two pipes."""

    def __init__(self, peer: PeerId, protocol: str, incoming: Pipe, outgoing: Pipe) -> None:
        self.peer = peer
        self.protocol = protocol
        self._incoming = incoming
        self._outgoing = outgoing
        self._closed = False

    async def read_into(self, buffer: memoryview) -> int:
        return 0 if self._closed else await self._incoming.read_into(buffer)

    def write(self, buffers: Sequence[Buffer]) -> None:
        self._check()
        data = b"".join(buffers)
        for start in range(0, len(data), PIECE_BYTES):  # a slow path brings a large write bit by bit
            self._outgoing.send(data[start : start + PIECE_BYTES])

    @property
    def unsent_bytes(self) -> int:
        return self._outgoing.unread_bytes

    async def drain(self) -> None:
        await self._outgoing.drained()
        self._check()

    def _check(self) -> None:
        if self._closed or self._outgoing.broken:
            raise PeerLost(f"the stream to peer {self.peer} is closed", peer=self.peer)

    @property
    def over(self) -> bool:
        """Whether nothing more can be read or written here."""
        return self._closed or self._incoming.broken

    async def close(self) -> None:
        self._end()

    def abort(self) -> None:
        self._end()

    def _end(self) -> None:
        if not self._closed:
            self.mute()
            self._outgoing.send(b"")

    def mute(self) -> None:
        """Close this end without telling the other peer, which goes on waiting."""
        self._closed = True
        self._incoming.end()

    def break_off(self) -> None:
        """Break both directions of the stream at once, as if the connection died."""
        self._incoming.break_off()
        self._outgoing.break_off()


def connect(opener: PeerId, target: PeerId, protocol: str, deliver: Deliver) -> tuple[FakeStream, FakeStream]:
    """Return the two ends of a new stream: the opener's and the target's."""
    there, back = Pipe(opener, target, deliver), Pipe(target, opener, deliver)
    near = FakeStream(target, protocol, incoming=back, outgoing=there)
    far = FakeStream(opener, protocol, incoming=there, outgoing=back)
    return near, far


RETRANSMISSION_S = 0.2  # TCP's minimum (Linux)


class Island:
    """Peers that have found one another, and their shared records. A client uses the records without being one of the peers."""

    def __init__(self, peers: Iterable[PeerId]) -> None:
        self.peers = set(peers)
        self.records: dict[bytes, dict[bytes, Record]] = {}

    def store(self, key: bytes, subkey: bytes, record: Record) -> bool:
        """Keep a record; return False, changing nothing, if one that expires later, or at the same time, is there."""
        known = self.records.setdefault(key, {}).get(subkey)
        if known is not None and known.expires_at >= record.expires_at:
            return False
        self.records[key][subkey] = record
        return True

    def absorb(self, other: Island) -> None:
        """Take the peers and records of another island."""
        self.peers |= other.peers
        for key, records in other.records.items():
            for subkey, record in records.items():
                self.store(key, subkey, record)


@dataclass(frozen=True)
class Path:
    """Direction from one peer to another. `loss` is the share of writes that are lost once and arrive by retransmission. Directions
    with the same `line` share it: they send one after another."""

    latency_s: float = 0.0
    bytes_per_s: float = math.inf
    loss: float = 0.0
    line: str = ""


class Medium:
    """Transport of bytes from pipe to pipe in the event loop's time. `random` draws the losses."""

    def __init__(self, random: random.Random) -> None:
        self.default_path = Path()
        self._random = random
        self._paths: dict[tuple[PeerId, PeerId], Path] = {}
        self._free_at: dict[object, float] = {}  # when a direction, or the line of several, has sent all its bytes
        self._hanging: dict[PeerId, asyncio.Event] = {}
        self._held: list[Pipe] = []  # one entry for each arrival that waits for a hanging peer

    def path(self, source: PeerId, target: PeerId) -> Path:
        """Return the latency, rate and loss from `source` to `target`: the set path, else the default one."""
        return self._paths.get((source, target), self.default_path)

    def set_path(self, source: PeerId, other: PeerId, path: Path, back: Path | None = None) -> None:
        """Set the path from `source` to `other`, and `back` (by default the same) in the other direction."""
        self._paths[source, other], self._paths[other, source] = path, back or path

    def hang(self, peer: PeerId) -> None:
        """Let a peer hang as by SIGSTOP, seen from outside: data to and from it stays on the way, and its own timers continue."""
        self._hanging.setdefault(peer, asyncio.Event())

    def wake(self, peer: PeerId) -> None:
        """End the hang of `peer`: its data that was held back arrives."""
        awake = self._hanging.pop(peer, None)
        if awake is not None:
            awake.set()
            held, self._held = self._held, []
            for pipe in held:
                self._arrive(pipe)

    async def travel(self, source: PeerId, target: PeerId) -> None:
        """Wait for the time of a very small message, and until neither peer hangs."""
        await asyncio.sleep(self.path(source, target).latency_s)
        for peer in (source, target):
            await self.awake(peer)

    async def awake(self, peer: PeerId) -> None:
        """Wait until `peer` does not hang any more."""
        while (hanging := self._hanging.get(peer)) is not None:
            await hanging.wait()

    def deliver(self, pipe: Pipe, size_bytes: int) -> None:
        """Schedule the arrival of `size_bytes` that the pipe was given."""
        loop = asyncio.get_running_loop()
        direction = (pipe.source, pipe.target)
        path = self.path(*direction)
        line = path.line or direction
        sent_at = max(loop.time(), self._free_at.get(line, 0.0)) + size_bytes / path.bytes_per_s
        self._free_at[line] = sent_at
        lost = path.loss > 0 and self._random.random() < path.loss
        delay_s = path.latency_s + (max(RETRANSMISSION_S, 2 * path.latency_s) if lost else 0.0)
        pipe.last_arrival_s = max(pipe.last_arrival_s, sent_at + delay_s)
        loop.call_at(pipe.last_arrival_s, self._arrive, pipe)

    def _arrive(self, pipe: Pipe) -> None:
        if pipe.source in self._hanging or pipe.target in self._hanging:
            self._held.append(pipe)
        elif not pipe.broken:
            pipe.arrive()
