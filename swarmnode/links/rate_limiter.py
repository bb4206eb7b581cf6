"""Rate limiter for all links of a node, and a stream that keeps to it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from swarmnode.errors import PeerLost
from swarmnode.net.interfaces import Buffer, Stream

PIECE_BYTES = 16 * 1024  # links take turns by pieces: one link's small frames do not wait for another's payload
BURST_S = 0.02
CLOSE_TIMEOUT_S = 10.0
LONGEST_BURST_S = 0.1


class RateLimiter:
    """Token bucket: `reserve` takes the tokens of bytes about to leave and returns how long to wait for them."""

    def __init__(self, rate_bps: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate_bps = rate_bps
        self._clock = clock
        self._free_at_s = -1e18  # when all reserved bytes have left

    @property
    def burst_bytes(self) -> int:
        """Bytes that may go at once, few enough for short pauses."""
        return max(1024, int(self.rate_bps / 8 * LONGEST_BURST_S))

    def reserve(self, size_bytes: int) -> float:
        """Reserve `size_bytes` and return the seconds until they may leave."""
        now_s = self._clock()
        begin_s = max(self._free_at_s, now_s - BURST_S)  # time unused within BURST_S is not lost
        self._free_at_s = begin_s + size_bytes * 8 / self.rate_bps
        return max(0.0, self._free_at_s - now_s)


class RateLimitedStream(Stream):
    """Stream that writes its buffers at the node's pace, in order. `close` lets them leave first."""

    def __init__(
        self, stream: Stream, rate_limiter: RateLimiter, *, on_left: Callable[[], None] = lambda: None
    ) -> None:
        self.peer, self.protocol, self.group = stream.peer, stream.protocol, stream.group
        self._stream = stream
        self._rate_limiter = rate_limiter
        self._on_left = on_left  # called when bytes have left
        self._waiting: deque[memoryview] = deque()
        self._waiting_bytes = 0
        self._pump: asyncio.Task[None] | None = None

    def write(self, buffers: Sequence[Buffer]) -> None:
        views = [memoryview(buffer) for buffer in buffers if len(buffer)]
        self._waiting.extend(views)
        self._waiting_bytes += sum(map(len, views))
        if self._waiting and (self._pump is None or self._pump.done()):
            self._pump = asyncio.get_running_loop().create_task(self._run(), name=f"pace to {self.peer}")

    async def _run(self) -> None:
        with suppress(PeerLost):  # the reader of the stream gets it
            while self._waiting:
                piece = self._next_piece()
                size_bytes = sum(map(len, piece))
                await asyncio.sleep(self._rate_limiter.reserve(size_bytes))
                self._waiting_bytes -= size_bytes
                self._stream.write(piece)
                self._on_left()
                await self._stream.drain()

    def _next_piece(self) -> list[Buffer]:
        """Return the next buffers, together at most one piece."""
        piece: list[Buffer] = []
        room_bytes = PIECE_BYTES
        while self._waiting and room_bytes > 0:
            view = self._waiting.popleft()
            piece.append(view[:room_bytes])
            if len(view) > room_bytes:
                self._waiting.appendleft(view[room_bytes:])
            room_bytes -= len(view)
        return piece

    @property
    def unsent_bytes(self) -> int:
        return self._waiting_bytes + self._stream.unsent_bytes

    @property
    def receive_bytes(self) -> int:
        return self._stream.receive_bytes

    async def drain(self) -> None:
        """Wait until everything has left. Raises PeerLost if the stream died meanwhile."""
        if self._pump is not None:
            await asyncio.wait([self._pump])  # an abort cancels it
        await self._stream.drain()

    async def read_into(self, buffer: memoryview) -> int:
        return await self._stream.read_into(buffer)

    async def close(self) -> None:
        """Let queued bytes leave for up to CLOSE_TIMEOUT_S seconds, then end the stream."""
        if self._pump is not None:
            _, late = await asyncio.wait([self._pump], timeout=CLOSE_TIMEOUT_S)  # an abort cancels it
            if late:
                self.abort()
        await self._stream.close()

    def abort(self) -> None:
        """Drop the queued bytes, and the stream."""
        self._waiting.clear()
        self._waiting_bytes = 0
        if self._pump is not None:
            self._pump.cancel()
        self._stream.abort()
