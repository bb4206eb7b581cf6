"""Throughput meter: how fast a peer's bytes come in, measured where they arrive, for there nothing in between can hide it."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable

MEASURED_BYTES = 64 * 1024  # of one frame: less says more of latencies than of bandwidth
FRAMES_KEPT = 5  # whose median counts: one that waited to be read came in no time, one that waited to be sent never
SHORTEST_S = 1e-6


class ThroughputMeter:
    """Fed after every read with what has come and how much of it belongs to a frame that is not whole yet.

    Only the time within large frames counts: between frames the sender may have had nothing to say.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.rate_bps: float | None = None
        self._rates_bps: deque[float] = deque(maxlen=FRAMES_KEPT)
        self._clock = clock
        self._began_s: float | None = None
        self._bytes = 0

    def __repr__(self) -> str:
        return (
            "<ThroughputMeter unknown>"
            if self.rate_bps is None
            else f"<ThroughputMeter {self.rate_bps / 1e6:.3g} Mbit/s>"
        )

    def note(self, read_bytes: int, pending_bytes: int) -> None:
        """`read_bytes` came; `pending_bytes` of all that came are of an unfinished frame."""
        if self._began_s is not None:
            self._bytes += read_bytes - (pending_bytes if pending_bytes < read_bytes else 0)
            if pending_bytes < read_bytes:  # the frame is whole, or another began: the measurement is over
                self._finish()
        if self._began_s is None and pending_bytes:
            self._began_s, self._bytes = self._clock(), 0

    def _finish(self) -> None:
        assert self._began_s is not None
        elapsed_s = max(self._clock() - self._began_s, SHORTEST_S)
        self._began_s = None
        if self._bytes >= MEASURED_BYTES:
            self._rates_bps.append(self._bytes * 8 / elapsed_s)
            self.rate_bps = statistics.median_low(self._rates_bps)
