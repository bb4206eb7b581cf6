"""The pace of a link: its heartbeat, and the rate limiter that all links of a node share."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from swarmnode.errors import PeerLost
from swarmnode.net.interfaces import Buffer, Stream


@dataclass(frozen=True)
class HeartbeatConfig:
    """Patience of a link.

    A peer that is silent while something is expected of it is lost after max(min_silence_s, silence_rtts round trips), at most
    max_silence_s. While a large payload is on its way, signs of life may be as rare as its pieces (libp2p encrypts up to 64 KiB as
    one): payload_silence_s allows 32 KiB/s.
    """

    busy_s: float = 0.4  # between two beats
    idle_s: float = 10.0  # between two pings while nothing is expected
    min_silence_s: float = 1.5
    payload_silence_s: float = 2.5
    max_silence_s: float = 10.0
    silence_rtts: float = 8.0


class Heartbeat:
    """Heartbeat of one link. `busy`: answers are expected. `paced`: a rate limiter may hold back sent data, until `left`."""

    def __init__(self, config: HeartbeatConfig, now_s: float, *, paced: bool) -> None:
        self.busy = False
        self._config = config
        self._paced = paced
        self._arrived_at_s = now_s
        self._silent_since_s: float | None = now_s  # None: nothing has left that the peer could answer
        self.pinged_at_s = 0.0
        self._owes_sign = False  # whether data arrived and nothing was sent since
        self._sent_bytes = 0  # sum of the bytes sent when it arrived

    def record_arrival(self, now_s: float) -> None:
        """Record that something arrived from the peer at `now_s`."""
        self._arrived_at_s = now_s
        self._silent_since_s = None if self._paced else now_s

    def left(self, now_s: float) -> None:
        """Note that data which was held back has been sent: an answer may be expected from now on."""
        if self._silent_since_s is None:
            self._silent_since_s = now_s

    def came(self, sent_bytes: int) -> None:
        """Note that data of the peer arrived, which this side must show at a beat. `sent_bytes` is the sum of the bytes sent so
        far."""
        if not self._owes_sign:
            self._owes_sign, self._sent_bytes = True, sent_bytes

    def limit_s(self, rtt_s: float | None, *, payload: bool) -> float:
        """Return the seconds that the peer may be silent while something is expected of it. `payload`: a large one is on its way to
        it."""
        config = self._config
        least_s = config.payload_silence_s if payload else config.min_silence_s
        return min(config.max_silence_s, max(least_s, config.silence_rtts * (rtt_s or 0.0)))

    @property
    def beat_s(self) -> float:
        """Seconds to the next beat: few while something is expected of the peer or owed to it, else until the next ping."""
        asked = self.pinged_at_s > self._arrived_at_s
        return self._config.busy_s if self.busy or self._owes_sign or asked else self._config.idle_s

    def too_long_s(self, now_s: float, limit_s: float, *, late_s: float, elsewhere_s: float) -> float | None:
        """Return the seconds of the peer's silence if they are more than `limit_s` (and an idle interval, if not busy); else None.

        `late_s`: how late this beat is. `elsewhere_s`: the last sign of life on another link with the peer.
        """
        if late_s > self._config.min_silence_s / 2:  # this process slept (suspended, or a blocked event loop)
            self.record_arrival(now_s)
        if self._silent_since_s is not None and elsewhere_s > self._silent_since_s:
            self.record_arrival(elsewhere_s)  # an answer on this link may queue behind the data there
        silence_s = 0.0 if self._silent_since_s is None else now_s - self._silent_since_s
        patience_s = limit_s + (0.0 if self.busy else self._config.idle_s)
        return silence_s if silence_s > patience_s else None

    def wants_ping(self, now_s: float) -> bool:
        """Return whether the peer should be pinged now."""
        due_s = 0.9 * (self._config.busy_s if self.busy else self._config.idle_s)
        return now_s - self._arrived_at_s >= due_s and now_s - self.pinged_at_s >= due_s

    def wants_sign(self, sent_bytes: int) -> bool:
        """Return whether to send a sign of life at this beat: data arrived since the last one, and nothing was sent since."""
        owes, self._owes_sign = self._owes_sign and sent_bytes == self._sent_bytes, False
        return owes


PACED_BYTES = 16 * 1024  # links take turns by pieces: one link's small frames do not wait for another's payload
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
                piece: list[Buffer] = []
                room_bytes = PACED_BYTES
                while self._waiting and room_bytes > 0:
                    view = self._waiting.popleft()
                    piece.append(view[:room_bytes])
                    if len(view) > room_bytes:
                        self._waiting.appendleft(view[room_bytes:])
                    room_bytes -= len(view)
                size_bytes = sum(map(len, piece))
                await asyncio.sleep(self._rate_limiter.reserve(size_bytes))
                self._waiting_bytes -= size_bytes
                self._stream.write(piece)
                self._on_left()
                await self._stream.drain()

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
