"""Stream over a direct TCP connection, in encrypted records (`records.py`)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from swarmnode.errors import PeerLost, ProtocolError
from swarmnode.net.direct.records import READ_BYTES, DirectionKey, RecordReader, contents
from swarmnode.net.interfaces import Buffer, PeerId
from swarmnode.net.transport_stream import CLOSE_TIMEOUT_S, TransportStream

MAX_UNREAD_BYTES = 256 * 1024  # beyond this the sender has to wait; one read may exceed it by its records
LINGER_S = 2.0  # for the peer to end its direction after this side has ended its own


class DirectStream(TransportStream, asyncio.BufferedProtocol):
    """Stream of bytes to and from a peer. Bytes are sealed only as the transport takes them, so that few are held twice."""

    def __init__(self, peer: PeerId, protocol: str, *, seals: DirectionKey, opens: DirectionKey) -> None:
        super().__init__()
        self.peer, self.protocol = peer, protocol
        self._seals = seals
        self._records = RecordReader(opens)
        self._unsealed: deque[Buffer] = deque()
        self._unsealed_bytes = 0
        self._unread: deque[memoryview] = deque()
        self._unread_bytes = 0
        self._reader: asyncio.Future[None] | None = None
        self._closing = False  # closed by this side: nothing more is written, and arriving data is dropped
        self._linger: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<DirectStream {self.protocol} to {self.peer} {self._state}, {self._unread_bytes} bytes unread>"

    @property
    def closed(self) -> asyncio.Future[None]:
        """Future that is done once the connection is gone."""
        return self._closed

    # -- asyncio's side

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._records.room()

    def buffer_updated(self, nbytes: int) -> None:
        try:
            arrived = list(self._records.advance(nbytes))
        except ProtocolError as error:
            self._lost = error
            self.drop()
            return
        for content in arrived:
            if not content:
                self._ended = True
            elif not (self._ended or self._closing):
                self._unread.append(memoryview(content))
                self._unread_bytes += len(content)
        if self._unread_bytes >= MAX_UNREAD_BYTES:
            self._pause_reading()
        self._wake_reader()

    def eof_received(self) -> bool:
        if not self._ended:
            self._lost = EOFError("cut short")
        return self._ended and self._linger is None  # the own direction stays open until `close`

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        if self._linger is not None:
            self._linger.cancel()
        self._wake_reader()

    def resume_writing(self) -> None:
        waiting, self._writable = self._writable, None
        self._seal()
        if self._writable is not None:  # paused again: `drain` goes on waiting
            self._writable = waiting
        elif waiting is not None and not waiting.done():
            waiting.set_result(None)

    # -- reading

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def read_into(self, buffer: memoryview) -> int:
        while not (self._unread or self._ended or self._closing):
            self._reader = self._loop.create_future()
            await self._reader
        if self._unread:
            return self._take(buffer)
        if self._lost is not None:
            raise PeerLost(f"the stream to peer {self.peer} was reset: {self._lost}", peer=self.peer)
        return 0

    def _take(self, buffer: memoryview) -> int:
        taken = 0
        while self._unread and taken < len(buffer):
            piece = self._unread.popleft()
            count = min(len(piece), len(buffer) - taken)
            buffer[taken : taken + count] = piece[:count]
            taken += count
            if count < len(piece):
                self._unread.appendleft(piece[count:])
        self._unread_bytes -= taken
        if self._unread_bytes < MAX_UNREAD_BYTES:
            self._read_on()
        return taken

    @property
    def receive_bytes(self) -> int:
        return READ_BYTES + self._unread_bytes

    # -- writing

    def write(self, buffers: Sequence[Buffer]) -> None:
        if self._closing:
            raise PeerLost(f"the stream to peer {self.peer} is closed", peer=self.peer)
        self._open_transport()
        for content in contents(buffers):
            self._unsealed.append(content)
            self._unsealed_bytes += len(content)
        self._seal()

    def _seal(self) -> None:
        transport = self._transport
        while self._unsealed and self._writable is None and transport is not None:
            content = self._unsealed.popleft()
            self._unsealed_bytes -= len(content)
            transport.writelines(self._seals.seal(content))

    @property
    def unsent_bytes(self) -> int:
        return self._unsealed_bytes + super().unsent_bytes

    # -- the end

    async def close(self) -> None:
        """Send the end of the stream and close.

        Data from the peer is taken and dropped for a while: a connection that is closed with bytes unread is reset, and a reset
        overtakes the last bytes sent.
        """
        if self._transport is None or self._closing:
            return
        self._closing = True
        self._unread.clear()
        self._unread_bytes = 0
        self._read_on()
        self._wake_reader()
        self._unsealed.append(b"")  # the end
        self._transport.set_write_buffer_limits(high=0)
        self._seal()
        try:
            await asyncio.wait_for(self.drain(), CLOSE_TIMEOUT_S)
        except (PeerLost, asyncio.TimeoutError):
            self.drop()
        else:
            if self._transport.is_closing():  # the peer reset the connection after the last bytes
                return
            self._linger = self._loop.call_later(LINGER_S, self.drop)
            self._transport.write_eof()
            if self._ended:
                self._transport.close()

    def abort(self) -> None:
        """Drop the stream, unless it was closed and waits only for the peer's end."""
        if self._linger is None:
            self.drop()

    def drop(self) -> None:
        """Close the connection at once, whatever it waits for."""
        super().abort()
