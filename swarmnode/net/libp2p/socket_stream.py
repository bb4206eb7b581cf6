"""A Stream over one of p2pd's unix sockets: after a short preamble of the daemon's, all bytes are the peer's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from swarmnode.errors import PeerLost, ProtocolError
from swarmnode.net.interfaces import Buffer
from swarmnode.net.transport_stream import CLOSE_TIMEOUT_S, TransportStream

PIECE_BYTES = 1 << 20  # p2pd is slower with larger writes
STAGING_BYTES = 16 * 1024
MAX_PREAMBLE_BYTES = STAGING_BYTES


class SocketStream(TransportStream, asyncio.BufferedProtocol):
    """Bytes to and from a peer. `preamble` is the daemon's length-prefixed message that comes before them.

    The socket is read straight into the buffer of whoever waits in `read_into`; what comes while nobody waits is staged,
    and when the staging buffer is full the peer has to wait.
    """

    def __init__(self, on_preamble: Callable[[SocketStream, bytes], None] = lambda _stream, _preamble: None) -> None:
        super().__init__()
        self._on_preamble = on_preamble
        self._preamble: asyncio.Future[bytes] = self._loop.create_future()
        self._staging = memoryview(bytearray(STAGING_BYTES))
        self._staged_bytes = 0
        self._target: memoryview | None = None  # the buffer of the reader who waits
        self._reader: asyncio.Future[int] | None = None

    def __repr__(self) -> str:
        return f"<SocketStream {self.protocol} to {self.peer} {self._state}, {self._staged_bytes} bytes unread>"

    # -- asyncio's side

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._staging[self._staged_bytes :] if self._target is None else self._target

    def buffer_updated(self, nbytes: int) -> None:
        if self._target is not None:
            self._wake_reader(nbytes)
            return
        self._staged_bytes += nbytes
        if not self._preamble.done():
            self._parse_preamble()
        if self._staged_bytes == STAGING_BYTES:
            self._pause_reading()

    def eof_received(self) -> bool:
        self._ended = True
        self._wake_reader(0)
        return True  # the other direction stays open until we close

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        if not self._preamble.done():
            self._preamble.set_exception(PeerLost("p2pd closed the connection"))
            self._preamble.exception()  # nobody may be waiting for it
        self._wake_reader(0)

    def _wake_reader(self, count: int) -> None:
        self._target = None
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(count)

    # -- the daemon's preamble

    def _parse_preamble(self) -> None:
        data = bytes(self._staging[: self._staged_bytes])
        length, start = read_varint(data)
        if length > MAX_PREAMBLE_BYTES - start:
            self._preamble.set_exception(ProtocolError("p2pd sent a message that is too large"))
        elif start and len(data) >= start + length:
            rest = data[start + length :]
            self._staged_bytes = len(rest)
            self._staging[: len(rest)] = rest
            preamble = data[start : start + length]
            self._preamble.set_result(preamble)
            self._on_preamble(self, preamble)

    async def preamble(self) -> bytes:
        """The daemon's message, once. Raises PeerLost where the daemon closed instead."""
        return await self._preamble

    # -- the peer's bytes

    async def read_into(self, buffer: memoryview) -> int:
        if not self._staged_bytes and not self._ended:
            self._target = buffer
            self._reader = self._loop.create_future()
            try:
                count = await self._reader
            finally:
                self._target = None
            if count:
                return count
        if self._staged_bytes:
            return self._unstage(buffer)
        if self._lost is not None:
            raise PeerLost(f"the stream to peer {self.peer} was reset", peer=self.peer)
        return 0

    def _unstage(self, buffer: memoryview) -> int:
        count = min(len(buffer), self._staged_bytes)
        buffer[:count] = self._staging[:count]
        self._staged_bytes -= count
        self._staging[: self._staged_bytes] = self._staging[count : count + self._staged_bytes]
        self._read_on()
        return count

    @property
    def receive_bytes(self) -> int:
        return STAGING_BYTES

    def write(self, buffers: Sequence[Buffer]) -> None:
        transport = self._open_transport()
        pieces: list[Buffer] = []
        for buffer in buffers:
            if len(buffer) <= PIECE_BYTES:
                pieces.append(buffer)
            else:
                view = memoryview(buffer)
                pieces.extend(view[start : start + PIECE_BYTES] for start in range(0, len(view), PIECE_BYTES))
        transport.writelines(pieces)

    async def close(self) -> None:
        if self._transport is None:
            return
        self._transport.close()
        await asyncio.wait([self._closed], timeout=CLOSE_TIMEOUT_S)
        self._transport.abort()  # the peer does not take what is left


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
