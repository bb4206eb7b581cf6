"""Link statistics: round trips of one link, and the measurements of all links of a node by path, from ordinary traffic.

Traffic on all links of a peer, by protocol: counted here, since links come and go.

Network coordinates: points in a small space whose distances are round trips, to estimate links that were never measured.

Vivaldi, Dabek, Cox, Kaashoek and Morris, SIGCOMM 2004: every peer is a mass, every measured round trip a spring between two of
them, and each measurement moves the measuring peer a little along its spring (section 3, figure 3). Three dimensions and a height,
which stands for the access link that every path of the peer passes (section 5.4). The length of the move depends on the certainty
of both (section 3.3). All times in milliseconds.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from swarmnode.codec.frames import MAX_SEQ
from swarmnode.metrics import table
from swarmnode.metrics.metric import Histogram, Reading, Readings
from swarmnode.net.fair_share import Recent
from swarmnode.net.interfaces import PeerId

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

    @property
    def rate_bps(self) -> float | None:
        """Rate of the peer's large frames in bits/s, on all links with it; None if there were none."""
        return self._arrivals.rate_bps

    def record(self, read_bytes: int, pending_bytes: int) -> None:
        """Count a read of `read_bytes`; `pending_bytes` of all bytes received belong to an unfinished frame."""
        self._arrivals.total_bytes += read_bytes
        if self._began_s is not None:
            next_bytes = pending_bytes if pending_bytes < read_bytes else 0  # of the next frame
            self._bytes += read_bytes - next_bytes
            if pending_bytes < read_bytes:  # the frame is complete: the measurement ends
                began_s, self._began_s = self._began_s, None
                if self._bytes >= MEASURED_BYTES:
                    now_s, came_bytes = self._clock(), self._arrivals.total_bytes - self._before_bytes - next_bytes
                    self._arrivals.measured(came_bytes * 8 / max(now_s - began_s, SHORTEST_S), now_s)
        if self._began_s is None and pending_bytes:
            self._began_s, self._bytes, self._before_bytes = self._clock(), 0, self._arrivals.total_bytes


class Traffic:
    """Bytes of frames sent and received, by protocol; libp2p's own overhead is not counted."""

    def __init__(self) -> None:
        self.sent_bytes: Counter[str] = Counter()
        self.received_bytes: Counter[str] = Counter()
        self._round_trips: dict[str, Histogram] = {}

    @property
    def total_bytes(self) -> int:
        """Bytes sent and received."""
        return self.sent_bytes.total() + self.received_bytes.total()

    def record_round_trip(self, protocol: str, seconds: float) -> None:
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


SAMPLES_KEPT = 5  # round trips; their median counts, since a single one may have queued behind a payload
PEERS_KEPT = 256
FRESH_S = 3600.0  # older bandwidths are ignored
RISE = 0.2  # share of a longer round trip that counts at once
QUEUE_BYTES = 64 * 1024  # fewer bytes do not delay a ping noticeably

OnRtt = Callable[[PeerId, float], None]

Guess = Callable[[PeerId], float | None]
"""Function that estimates the round trip to a peer in seconds without a measurement of its own; None if it cannot."""


class RoundTrips:
    """Round trips of one link. One ping is timed at a time, since others may follow before its answer if the round trip is longer
    than their period."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.rtt_s: float | None = None  # rises by a moving average
        self._clock = clock
        self._ping = 0
        self._timed_ping = 0  # the ping whose answer is timed; 0: none
        self._timed_at_s = 0.0
        self._timed_queue_bytes = 0  # sent just before it
        self._queued_bytes = 0  # sent since
        self._behind = 0  # the last ping that left after a large payload; 0 once it was answered

    @property
    def begun(self) -> bool:
        """Whether a ping was ever sent."""
        return self._ping > 0

    @property
    def payload_ahead(self) -> bool:
        """Whether a large payload sent before a ping may still be on its way."""
        return self._behind > 0

    def ping(self, *, queued_bytes: int = 0) -> int:
        """Return the number of a ping that leaves now, `queued_bytes` after the one before it."""
        self._ping = self._ping % MAX_SEQ + 1
        self._queued_bytes += queued_bytes
        if queued_bytes >= QUEUE_BYTES:
            self._behind = self._ping
        if not self._timed_ping:
            self._timed_ping, self._timed_at_s = self._ping, self._clock()
            self._timed_queue_bytes, self._queued_bytes = self._queued_bytes, 0
        return self._ping

    def pong(self, number: int) -> float | None:
        """Take the answer to the ping `number`. Returns the round trip in seconds; None if that ping was not timed, or waited
        behind a payload."""
        if number == self._behind:
            self._behind = 0
        if not self._timed_ping or number != self._timed_ping:
            return None
        self._timed_ping = 0
        sample_s = self._clock() - self._timed_at_s
        rises = self.rtt_s is not None and sample_s > self.rtt_s
        if rises and self._timed_queue_bytes >= QUEUE_BYTES:
            return None
        # A shorter round trip counts at once: single answers are often delayed, never hastened.
        self.rtt_s = (1 - RISE) * (self.rtt_s or 0.0) + RISE * sample_s if rises else sample_s
        return sample_s


@dataclass(slots=True)
class PathMeasurement:
    """Measurements of the path to one peer. Bandwidths in bits/s; times as of the clock."""

    rtts_s: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES_KEPT))
    up_bps: float = 0.0
    up_at_s: float = float("-inf")
    down_bps: float = 0.0
    down_at_s: float = float("-inf")
    arrived_at_s: float = float("-inf")  # on the event loop's clock
    arrivals: Arrivals = field(default_factory=Arrivals)

    @property
    def rtt_s(self) -> float | None:
        """Median of the last round trips in seconds; None before the first."""
        return statistics.median_low(self.rtts_s) if self.rtts_s else None


UNMEASURED = PathMeasurement()


class LinkStatistics:
    """Measurements of the paths to peers, shared by all links of a node. The peer updated least recently is forgotten first.

    `on_rtt` is called with the peer and its median round trip after each measurement. `guess` estimates unmeasured round trips.
    `at_home` returns whether a peer is in this node's own home network, so that the path says nothing about the line out of it.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_rtt: OnRtt | None = None,
        guess: Guess = lambda _peer: None,
        at_home: Callable[[PeerId], bool] = lambda _peer: False,
    ) -> None:
        self.on_rtt = on_rtt
        self.at_home = at_home
        self._guess = guess
        self._clock = clock
        self._peers: Recent[PeerId, PathMeasurement] = Recent(PEERS_KEPT)

    def round_trip(self, peer: PeerId, rtt_s: float) -> None:
        """Record a round trip of `rtt_s` seconds to `peer`."""
        path = self._of(peer)
        path.rtts_s.append(rtt_s)
        if self.on_rtt is not None and path.rtt_s is not None:
            self.on_rtt(peer, path.rtt_s)

    def record_arrival(self, peer: PeerId, now_s: float) -> None:
        """Record that data of the peer arrived at `now_s` on the event loop's clock, on any link with it."""
        # a peer that is known does not become the latest
        (self._peers.get(peer) or self._of(peer)).arrived_at_s = now_s

    def arrived_at_s(self, peer: PeerId) -> float:
        """Return the time of the last data of the peer on the event loop's clock; minus infinity if there was none."""
        return self._peers.get(peer, UNMEASURED).arrived_at_s

    def arrivals(self, peer: PeerId) -> Arrivals:
        """Return the counts of the peer's data, which all links with it share."""
        return self._of(peer).arrivals

    def rtt_s(self, peer: PeerId) -> float | None:
        """Return the median round trip to a peer in seconds; None if unmeasured."""
        return self._peers.get(peer, UNMEASURED).rtt_s

    def expected_rtt_s(self, peer: PeerId) -> float | None:
        """Return the expected round trip to a peer in seconds: measured, else guessed, else the median of all measured peers; None
        if there are none."""
        if (rtt_s := self.rtt_s(peer)) is not None or (rtt_s := self._guess(peer)) is not None:
            return rtt_s
        return statistics.median_high(others) if (others := self.rtts_s().values()) else None

    def sent(self, peer: PeerId, rate_bps: float) -> None:
        """Record that the peer received large frames at `rate_bps`."""
        path = self._of(peer)
        path.up_bps, path.up_at_s = rate_bps, self._clock()

    def received(self, peer: PeerId, rate_bps: float) -> None:
        """Record that large frames of the peer arrived at `rate_bps`."""
        path = self._of(peer)
        path.down_bps, path.down_at_s = rate_bps, self._clock()

    def rtts_s(self, most: int | None = None) -> dict[PeerId, float]:
        """Return the round trips to at most `most` peers (None: all), those measured last first."""
        known = {peer: rtt_s for peer, one in reversed(self._peers.items()) if (rtt_s := one.rtt_s) is not None}
        return dict(list(known.items())[:most])

    def up_bps_to(self, peer: PeerId) -> float:
        """Return the rate at which the peer lately received large frames, in bits/s; 0 if there is no fresh measurement."""
        path = self._peers.get(peer, UNMEASURED)
        return path.up_bps if path.up_at_s >= self._clock() - FRESH_S else 0.0

    def ups_bps(self, most: int) -> dict[PeerId, float]:
        """Return `up_bps_to` of at most `most` peers with a fresh measurement, those measured last first."""
        rates_bps = ((peer, self.up_bps_to(peer)) for peer in reversed(self._peers))
        return dict(islice(((peer, rate_bps) for peer, rate_bps in rates_bps if rate_bps > 0), most))

    @property
    def up_bps(self) -> float:
        """Upload bandwidth of this node in bits/s; 0 if no large frame has left lately."""
        fresh_s = self._clock() - FRESH_S
        return self._capacity({peer: one.up_bps for peer, one in self._peers.items() if one.up_at_s >= fresh_s})

    @property
    def down_bps(self) -> float:
        """Download bandwidth of this node in bits/s; 0 if no large frame has arrived lately."""
        fresh_s = self._clock() - FRESH_S
        return self._capacity({peer: one.down_bps for peer, one in self._peers.items() if one.down_at_s >= fresh_s})

    def rated_peers(self) -> set[PeerId]:
        """Return the peers whose paths were measured lately in both directions."""
        fresh_s = self._clock() - FRESH_S
        return {peer for peer, one in self._peers.items() if one.up_at_s >= fresh_s and one.down_at_s >= fresh_s}

    def _capacity(self, rates_bps: Mapping[PeerId, float]) -> float:
        """Return the bandwidth of the own access link: the upper quartile of the rates, so that narrow paths, and false claims of a
        quarter of the peers, do not count.

        Paths at home count only if there are no others.
        """
        away_bps = [rate_bps for peer, rate_bps in rates_bps.items() if not self.at_home(peer)]
        ranked = sorted(away_bps or rates_bps.values(), reverse=True)
        return ranked[len(ranked) // 4] if ranked else 0.0

    def _of(self, peer: PeerId) -> PathMeasurement:
        path = self._peers[peer] = self._peers.get(peer) or PathMeasurement()
        return path


STEP_MS = 0.1  # unit of the integers of an announced coordinate
MAX_STEPS = 1 << 20
SMALLEST_HEIGHT_MS = 0.1
ERROR_WEIGHT = 0.25  # c_e: share of a measurement's relative error in the own error
MOVE_WEIGHT = 0.25  # c_c: largest share of the way that one measurement moves the coordinate
MAX_ERROR = 1.0


@dataclass(frozen=True, slots=True)
class Coordinate:
    """Network coordinate: a point (x, y, z) and a height above it, both in milliseconds, and the relative error of its
    estimates."""

    place: tuple[float, float, float] = (0.0, 0.0, 0.0)
    height_ms: float = SMALLEST_HEIGHT_MS
    error: float = MAX_ERROR

    def __repr__(self) -> str:
        x, y, z = self.place
        return f"<Coordinate ({x:.1f}, {y:.1f}, {z:.1f}) + {self.height_ms:.1f} ms, error {self.error:.0%}>"

    def rtt_ms(self, other: Coordinate) -> float:
        """Return the estimated round trip to a peer at another coordinate, in milliseconds."""
        return math.dist(self.place, other.place) + self.height_ms + other.height_ms

    def moved(self, other: Coordinate, rtt_ms: float, direction: Sequence[float]) -> Coordinate:
        """Return the coordinate after a measured round trip to `other`. `direction` is used if both are at the same point."""
        sureness = self.error / (self.error + other.error)
        estimate_ms = self.rtt_ms(other)
        relative_error = min(abs(estimate_ms - rtt_ms) / rtt_ms, 10.0)
        weight = ERROR_WEIGHT * sureness
        error = min(MAX_ERROR, relative_error * weight + self.error * (1 - weight))
        pull_ms = MOVE_WEIGHT * sureness * (rtt_ms - estimate_ms)
        away = [mine - theirs for mine, theirs in zip(self.place, other.place, strict=True)]
        distance_ms = math.hypot(*away)
        if distance_ms < 1e-6:
            away, distance_ms = list(direction), math.hypot(*direction)
        heights_ms = self.height_ms + other.height_ms
        length_ms = distance_ms + heights_ms
        x, y, z = (mine + pull_ms * part / length_ms for mine, part in zip(self.place, away, strict=True))
        height_ms = max(SMALLEST_HEIGHT_MS, self.height_ms + pull_ms * heights_ms / length_ms)
        return Coordinate((x, y, z), height_ms, max(error, 0.01))

    def packed(self) -> tuple[int, ...]:
        """Return the announced form: x, y, z and height in steps of 0.1 ms, and the error in percent."""
        steps = (round(number / STEP_MS) for number in (*self.place, self.height_ms))
        return (*(max(-MAX_STEPS, min(MAX_STEPS, step)) for step in steps), math.ceil(self.error * 100))

    @classmethod
    def unpacked(cls, numbers: Sequence[int]) -> Coordinate | None:
        """Return the coordinate that a peer announced; None if it has none yet, or its error says that it knows nothing."""
        if len(numbers) != 5 or numbers[4] >= MAX_ERROR * 100:
            return None
        x, y, z, height_ms = (number * STEP_MS for number in numbers[:4])
        return cls((x, y, z), max(height_ms, SMALLEST_HEIGHT_MS), max(numbers[4] / 100, 0.01))


class OwnCoordinate:
    """Keeper of this peer's own coordinate, updated from the round trips that links measure."""

    def __init__(self, seed: object) -> None:
        self.coordinate = Coordinate()
        self._random = random.Random(repr(seed))

    def measured(self, theirs: Coordinate | None, rtt_s: float) -> None:
        """Update the coordinate by a round trip to a peer at `theirs`; None if that peer announces none, so that it counts as
        knowing nothing."""
        if rtt_s > 0:
            direction = [self._random.gauss(0, 1) for _ in range(3)]
            self.coordinate = self.coordinate.moved(theirs or Coordinate(), rtt_s * 1e3, direction)
