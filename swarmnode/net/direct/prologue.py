"""The first bytes of a direct connection, in either direction: a word that shows that its sender knows what was agreed on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from swarmnode.errors import PeerLost
from swarmnode.net.direct.agreement import TOKEN_BYTES
from swarmnode.net.direct.direct_stream import DirectStream


class Prologue(asyncio.BufferedProtocol):
    """Reads one word and nothing beyond it. `settled` is called once: the word has come, or the connection is gone."""

    def __init__(
        self,
        made: Callable[[Prologue], None] = lambda _prologue: None,
        settled: Callable[[Prologue], None] = lambda _prologue: None,
    ) -> None:
        self._word: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._made = made
        self._settled = settled
        self._transport: asyncio.Transport | None = None
        self._data = memoryview(bytearray(TOKEN_BYTES))
        self._filled_bytes = 0

    def __repr__(self) -> str:
        return f"<Prologue from {self.host} with {self._filled_bytes} of {TOKEN_BYTES} bytes>"

    @property
    def host(self) -> str:
        """The IP address of the other side; empty where it is gone already."""
        name = None if self._transport is None else self._transport.get_extra_info("peername")
        return str(name[0]) if name else ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own class, with the same methods
        self._made(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._data[self._filled_bytes :]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled_bytes += nbytes
        if self._filled_bytes == TOKEN_BYTES and self._transport is not None:
            self._transport.pause_reading()  # what follows is for the stream
            self._word.set_result(bytes(self._data))
            self._settled(self)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._word.done():
            self._word.set_exception(PeerLost("the direct connection was closed"))
            self._word.exception()  # nobody may be waiting for it
            self._settled(self)

    async def word(self) -> bytes:
        """What the other side shows. Raises PeerLost."""
        return await asyncio.shield(self._word)

    @property
    def shown(self) -> bytes | None:
        """The word, where it has come."""
        return self._word.result() if self._word.done() and self._word.exception() is None else None

    def say(self, word: bytes) -> None:
        """Show our own."""
        if self._transport is not None:
            self._transport.write(word)

    def hand_over(self, stream: DirectStream) -> None:
        """From now on the connection is the stream's."""
        assert self._transport is not None
        self._transport.set_protocol(stream)
        stream.connection_made(self._transport)
        self._transport.resume_reading()

    def abort(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()
