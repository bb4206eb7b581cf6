"""Common part of streams over an asyncio transport: how a writer waits, and how they are dropped."""

from __future__ import annotations

import asyncio
from typing import cast

from swarmnode.errors import PeerLost
from swarmnode.net.fair_share import CountedStream
from swarmnode.net.interfaces import PeerId

WRITE_HIGH_BYTES = 1 << 20
CLOSE_TIMEOUT_S = 2.0


class TransportStream(CountedStream):
    """A stream that is also the protocol of its asyncio transport; subclasses choose the kind of protocol."""

    def __init__(self) -> None:
        self.peer: PeerId = ""
        self.protocol = ""
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._ended = False  # nothing more will be read
        self._lost: BaseException | None = None
        self._paused_reading = False
        self._writable: asyncio.Future[None] | None = None
        self._closed: asyncio.Future[None] = self._loop.create_future()

    @property
    def _state(self) -> str:
        return "closed" if self._closed.done() else "ended" if self._ended else "open"

    # -- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport of a new connection; called by asyncio."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own class, with the same methods
        self._transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)

    def connection_lost(self, error: Exception | None) -> None:
        """Note the end of the connection, and wake waiting writers, which then see it; called by asyncio."""
        self._ended = True
        self._lost = self._lost or error
        for future in (self._closed, self._writable):
            if future is not None and not future.done():
                future.set_result(None)

    def pause_writing(self) -> None:
        """Make writers wait: the transport's buffer is full."""
        self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        """Let waiting writers go on: the transport's buffer has room again (called by asyncio)."""
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._writable = None

    def _pause_reading(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()
            self._paused_reading = True

    def _read_on(self) -> None:
        if self._paused_reading and self._transport is not None:
            self._paused_reading = False
            self._transport.resume_reading()

    # -- the owner's side

    def _open_transport(self) -> asyncio.Transport:
        """Return the transport for writing. Raises PeerLost if it is closed."""
        if self._transport is None or self._transport.is_closing():
            raise PeerLost(f"the stream to peer {self.peer} is closed", peer=self.peer)
        return self._transport

    @property
    def unsent_bytes(self) -> int:
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    async def drain(self) -> None:
        if self._writable is not None:
            await asyncio.shield(self._writable)
        if self._transport is None or self._transport.is_closing():
            raise PeerLost(f"the stream to peer {self.peer} was lost", peer=self.peer)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
