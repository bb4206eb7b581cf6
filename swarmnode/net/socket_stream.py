"""A Stream over one of p2pd's unix sockets: after a short preamble of the daemon's, all bytes are the peer's."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import cast

from swarmnode.errors import PeerLost, ProtocolError
from swarmnode.net.interfaces import Buffer, PeerId, Stream

PIECE_BYTES = 1 << 20  # p2pd is slower with larger writes
READ_HIGH_BYTES = 4 << 20
WRITE_HIGH_BYTES = 1 << 20
MAX_PREAMBLE_BYTES = 64 << 10


class SocketStream(Stream, asyncio.Protocol):
    """Bytes to and from a peer. `preamble` is the daemon's length-prefixed message that comes before them."""

    def __init__(self, on_preamble: Callable[[SocketStream], None] = lambda _stream: None) -> None:
        self.peer: PeerId = ""
        self.protocol = ""
        self._loop = asyncio.get_running_loop()
        self._on_preamble = on_preamble
        self._preamble: asyncio.Future[bytes] = self._loop.create_future()
        self._transport: asyncio.Transport | None = None
        self._chunks: deque[bytes] = deque()
        self._held_bytes = 0
        self._ended = False
        self._lost: BaseException | None = None
        self._paused_reading = False
        self._reader: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._closed: asyncio.Future[None] = self._loop.create_future()

    def __repr__(self) -> str:
        state = "closed" if self._closed.done() else "ended" if self._ended else "open"
        return f"<SocketStream {self.protocol} to {self.peer} {state}, {self._held_bytes} bytes unread>"

    # -- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own class, with the same methods
        self._transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)

    def data_received(self, data: bytes) -> None:
        self._chunks.append(data)
        self._held_bytes += len(data)
        if not self._preamble.done():
            self._parse_preamble()
        elif self._held_bytes > READ_HIGH_BYTES and self._transport is not None:
            self._transport.pause_reading()
            self._paused_reading = True
        self._wake_reader()

    def eof_received(self) -> bool:
        self._ended = True
        self._wake_reader()
        return True  # the other direction stays open until we close

    def connection_lost(self, error: Exception | None) -> None:
        self._ended = True
        self._lost = error
        for future in (self._closed, self._writable):
            if future is not None and not future.done():
                future.set_result(None)
        if not self._preamble.done():
            self._preamble.set_exception(PeerLost("p2pd closed the connection"))
            self._preamble.exception()  # nobody may be waiting for it
        self._wake_reader()

    def pause_writing(self) -> None:
        self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._writable = None

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    # -- the daemon's preamble

    def _parse_preamble(self) -> None:
        data = b"".join(self._chunks)
        length, start = read_varint(data)
        if length > MAX_PREAMBLE_BYTES:
            self._preamble.set_exception(ProtocolError("p2pd sent a message that is too large"))
        elif start and len(data) >= start + length:
            rest = data[start + length :]
            self._chunks = deque([rest] if rest else [])
            self._held_bytes = len(rest)
            self._preamble.set_result(data[start : start + length])
            self._on_preamble(self)

    async def preamble(self) -> bytes:
        """The daemon's message, once. Raises PeerLost where the daemon closed instead."""
        return await self._preamble

    # -- the peer's bytes

    async def read(self) -> Buffer:
        while not self._chunks:
            if self._lost is not None:
                raise PeerLost(f"the stream to peer {self.peer} was reset", peer=self.peer)
            if self._ended:
                return b""
            self._reader = self._loop.create_future()
            await self._reader
        data = self._chunks.popleft()
        self._held_bytes -= len(data)
        if self._paused_reading and self._held_bytes < READ_HIGH_BYTES // 2 and self._transport is not None:
            self._paused_reading = False
            self._transport.resume_reading()
        return data

    def write(self, buffers: Sequence[Buffer]) -> None:
        if self._transport is None or self._transport.is_closing():
            raise PeerLost(f"the stream to peer {self.peer} is closed", peer=self.peer)
        small: list[Buffer] = []
        for buffer in buffers:
            if len(buffer) <= PIECE_BYTES:
                small.append(buffer)
                continue
            view = memoryview(buffer).cast("B")
            small.extend(view[start : start + PIECE_BYTES] for start in range(0, len(view), PIECE_BYTES))
        self._transport.writelines(small)

    async def drain(self) -> None:
        if self._writable is not None:
            await asyncio.shield(self._writable)
        if self._transport is None or self._transport.is_closing():
            raise PeerLost(f"the stream to peer {self.peer} was lost", peer=self.peer)

    async def close(self) -> None:
        if self._transport is None:
            return
        self._transport.close()
        await asyncio.shield(self._closed)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


def read_varint(data: bytes) -> tuple[int, int]:
    """(value, bytes used) of an unsigned LEB128 number; (0, 0) where it is not complete."""
    value = shift = 0
    for position, byte in enumerate(data[:10]):
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position + 1
        shift += 7
    return 0, 0


def write_varint(value: int) -> bytes:
    """The unsigned LEB128 form of a number."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
