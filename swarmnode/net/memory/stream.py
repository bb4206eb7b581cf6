"""Streams of the fake network: two pipes, whose bytes arrive at a time that the world chooses."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from swarmnode.errors import PeerLost
from swarmnode.net.interfaces import Buffer, PeerId
from swarmnode.net.limits.stream_limits import CountedStream

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

    def __repr__(self) -> str:
        state = "broken" if self.broken else "ended" if self.ended else "open"
        return f"<Pipe to {self.target} {state}, {self.unread_bytes} bytes unread>"

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

    def __repr__(self) -> str:
        state = "closed" if self._closed else "broken" if self._incoming.broken else "open"
        return f"<FakeStream {self.protocol} to {self.peer} {state}>"

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
