"""Link statistics: round trips of one link, and the measurements of all links of a node by path, from ordinary traffic."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice

from swarmnode.codec.frames import MAX_SEQ
from swarmnode.net.interfaces import PeerId
from swarmnode.net.limits.fair_share import Recent
from swarmnode.net.measuring.traffic import Arrivals

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

    def __repr__(self) -> str:
        return f"<RoundTrips {'not measured' if self.rtt_s is None else f'{self.rtt_s * 1e3:.1f} ms'}>"

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
    heard_at_s: float = float("-inf")  # on the event loop's clock
    arrivals: Arrivals = field(default_factory=Arrivals)

    @property
    def rtt_s(self) -> float | None:
        """Median of the last round trips in seconds; None before the first."""
        return statistics.median_low(self.rtts_s) if self.rtts_s else None


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

    def __repr__(self) -> str:
        up, down = (f"{rate / 1e6:.3g}" if rate else "?" for rate in (self.up_bps, self.down_bps))
        return f"<LinkStatistics of {len(self._peers)} peers, {up} Mbit/s up, {down} down>"

    def round_trip(self, peer: PeerId, rtt_s: float) -> None:
        """Record a round trip of `rtt_s` seconds to `peer`."""
        path_measurement = self._of(peer)
        path_measurement.rtts_s.append(rtt_s)
        if self.on_rtt is not None and path_measurement.rtt_s is not None:
            self.on_rtt(peer, path_measurement.rtt_s)

    def heard(self, peer: PeerId, now_s: float) -> None:
        """Record that data of the peer arrived at `now_s` on the event loop's clock, on any link with it."""
        path_measurement = self._peers.get(peer)
        (self._of(peer) if path_measurement is None else path_measurement).heard_at_s = now_s

    def heard_at_s(self, peer: PeerId) -> float:
        """Return the time of the last data of the peer on the event loop's clock; minus infinity if there was none."""
        path_measurement = self._peers.get(peer)
        return float("-inf") if path_measurement is None else path_measurement.heard_at_s

    def arrivals(self, peer: PeerId) -> Arrivals:
        """Return the counts of the peer's data, which all links with it share."""
        return self._of(peer).arrivals

    def rtt_s(self, peer: PeerId) -> float | None:
        """Return the median round trip to a peer in seconds; None if unmeasured."""
        path_measurement = self._peers.get(peer)
        return None if path_measurement is None else path_measurement.rtt_s

    def expected_rtt_s(self, peer: PeerId) -> float | None:
        """Return the expected round trip to a peer in seconds: measured, else guessed, else the median of all measured peers; None
        if there are none."""
        rtt_s = self.rtt_s(peer)
        if rtt_s is None:
            rtt_s = self._guess(peer)
        if rtt_s is None:
            rtt_s = statistics.median_high(others) if (others := self.rtts_s().values()) else None
        return rtt_s

    def sent(self, peer: PeerId, rate_bps: float) -> None:
        """Record that the peer received large frames at `rate_bps`."""
        path_measurement = self._of(peer)
        path_measurement.up_bps, path_measurement.up_at_s = rate_bps, self._clock()

    def received(self, peer: PeerId, rate_bps: float) -> None:
        """Record that large frames of the peer arrived at `rate_bps`."""
        path_measurement = self._of(peer)
        path_measurement.down_bps, path_measurement.down_at_s = rate_bps, self._clock()

    def rtts_s(self, most: int | None = None) -> dict[PeerId, float]:
        """Return the round trips to at most `most` peers (None: all), those measured last first."""
        known = {peer: rtt_s for peer, one in reversed(self._peers.items()) if (rtt_s := one.rtt_s) is not None}
        return dict(list(known.items())[:most])

    def up_bps_to(self, peer: PeerId) -> float:
        """Return the rate at which the peer lately received large frames, in bits/s; 0 if there is no fresh measurement."""
        path_measurement = self._peers.get(peer)
        is_fresh = path_measurement is not None and path_measurement.up_at_s >= self._clock() - FRESH_S
        return path_measurement.up_bps if path_measurement is not None and is_fresh else 0.0

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
        path_measurement = self._peers[peer] = self._peers.get(peer) or PathMeasurement()
        return path_measurement
