"""Traffic on all links of a peer, by protocol: counted here, since links come and go."""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Callable

from swarmnode.metrics import table
from swarmnode.metrics.metric import Histogram, Reading, Readings

MEASURED_BYTES = 64 * 1024  # of one frame: smaller frames measure latency rather than bandwidth
FRAMES_KEPT = 5  # the median counts: a frame that waited to be read looks too fast, one that waited to be sent too slow
KEPT_S = 30.0  # age after which a frame does not count beside a new one: a rarely used path may have changed since
SHORTEST_S = 1e-6


class Arrivals:
    """Bytes received from one peer over all links with it, and their rate."""

    def __init__(self) -> None:
        self.total_bytes = 0
        self.rate_bps: float | None = None
        self._measured: deque[tuple[float, float]] = deque(maxlen=FRAMES_KEPT)  # when, and bits/s

    def __repr__(self) -> str:
        rate = "unknown" if self.rate_bps is None else f"{self.rate_bps / 1e6:.3g} Mbit/s"
        return f"<Arrivals {self.total_bytes} bytes, {rate}>"

    def measured(self, rate_bps: float, now_s: float) -> None:
        """Record that data of the peer arrived at `rate_bps` while a large frame did, at `now_s`."""
        self._measured.append((now_s, rate_bps))
        self.rate_bps = statistics.median_low(bps for at_s, bps in self._measured if at_s >= now_s - KEPT_S)


class ThroughputMeter:
    """Measurement of received throughput on one link, fed after every read.

    Only the time within large frames counts: between frames the sender may have had nothing to send. Data on the peer's other links
    during that time counts, too, since they share the path.
    """

    def __init__(self, clock: Callable[[], float], arrivals: Arrivals | None = None) -> None:
        self._arrivals = arrivals or Arrivals()
        self._clock = clock
        self._began_s: float | None = None
        self._bytes = 0  # of the frame
        self._before_bytes = 0  # of the peer before the frame

    def __repr__(self) -> str:
        return f"<ThroughputMeter, {self._arrivals!r}>"

    @property
    def rate_bps(self) -> float | None:
        """Rate of the peer's large frames in bits/s, on all links with it; None if there were none."""
        return self._arrivals.rate_bps

    def note(self, read_bytes: int, pending_bytes: int) -> None:
        """Count a read of `read_bytes`; `pending_bytes` of all bytes received belong to an unfinished frame."""
        self._arrivals.total_bytes += read_bytes
        if self._began_s is not None:
            next_bytes = pending_bytes if pending_bytes < read_bytes else 0  # of the next frame
            self._bytes += read_bytes - next_bytes
            if pending_bytes < read_bytes:  # the frame is complete: the measurement ends
                self._finish(self._began_s, self._arrivals.total_bytes - self._before_bytes - next_bytes)
        if self._began_s is None and pending_bytes:
            self._began_s, self._bytes, self._before_bytes = self._clock(), 0, self._arrivals.total_bytes

    def _finish(self, began_s: float, came_bytes: int) -> None:
        self._began_s = None
        if self._bytes >= MEASURED_BYTES:
            now_s = self._clock()
            self._arrivals.measured(came_bytes * 8 / max(now_s - began_s, SHORTEST_S), now_s)


class Traffic:
    """Bytes of frames sent and received, by protocol; libp2p's own overhead is not counted."""

    def __init__(self) -> None:
        self.sent_bytes: Counter[str] = Counter()
        self.received_bytes: Counter[str] = Counter()
        self._round_trips: dict[str, Histogram] = {}

    def __repr__(self) -> str:
        return f"<Traffic {self.sent_bytes.total()} bytes sent, {self.received_bytes.total()} received>"

    @property
    def total_bytes(self) -> int:
        """Bytes sent and received."""
        return self.sent_bytes.total() + self.received_bytes.total()

    def note_round_trip(self, protocol: str, seconds: float) -> None:
        """Record a round trip of a ping in seconds."""
        self._round_trips.setdefault(protocol, Histogram()).observe(seconds)

    def readings(self) -> Readings:
        """Yield the metrics: bytes by protocol and direction, and round trips by protocol."""
        for direction, counts in (("sent", self.sent_bytes), ("received", self.received_bytes)):
            for protocol, count in counts.items():
                yield Reading(table.LINK_BYTES, count, (protocol, direction))
        for protocol, round_trips in self._round_trips.items():
            yield Reading(table.ROUND_TRIP_SECONDS, round_trips, (protocol,))


def protocol_name(protocol: str) -> str:
    """Return the short name of a protocol: `session` for `/swarmnode/session/1`."""
    return protocol.removeprefix("/swarmnode").strip("/").split("/")[0]
