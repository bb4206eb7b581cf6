"""Link statistics: round trips of one link, and the measurements of all links of a peer by path, from ordinary traffic."""

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

SAMPLES_KEPT = 5  # of round trips: their median counts, for a single one may have queued behind a payload
PEERS_KEPT = 256
FRESH_S = 3600.0  # older bandwidths say little of now
RISE = 0.2  # how much of a longer round trip counts at once
QUEUE_BYTES = 64 * 1024  # less than this is sent in no time

OnRtt = Callable[[PeerId, float], None]

Guess = Callable[[PeerId], float | None]
"""A round trip to a peer in seconds, told from something else than its answers; None if nothing tells it"""


class RoundTrips:
    """One ping is timed at a time: where others follow it before its answer, the round trip is longer than their period."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.rtt_s: float | None = None  # rises by a moving average
        self._clock = clock
        self._ping = 0
        self._timed_ping = 0  # whose answer is measured; 0 is none
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
        """Whether a large payload that was sent before a ping may still be on its way."""
        return self._behind > 0

    def ping(self, *, queued_bytes: int = 0) -> int:
        """The number of a ping that leaves now, after so many bytes since the one before it."""
        self._ping = self._ping % MAX_SEQ + 1
        self._queued_bytes += queued_bytes
        if queued_bytes >= QUEUE_BYTES:
            self._behind = self._ping
        if not self._timed_ping:
            self._timed_ping, self._timed_at_s = self._ping, self._clock()
            self._timed_queue_bytes, self._queued_bytes = self._queued_bytes, 0
        return self._ping

    def pong(self, number: int) -> float | None:
        """An answer has come: the seconds that it took, where it is to the ping that is timed and says how long the way is."""
        if number == self._behind:
            self._behind = 0
        if not self._timed_ping or number != self._timed_ping:
            return None
        self._timed_ping = 0
        sample_s = self._clock() - self._timed_at_s
        rises = self.rtt_s is not None and sample_s > self.rtt_s
        if rises and self._timed_queue_bytes >= QUEUE_BYTES:
            return None
        # It falls at once: what delays a single answer is common, what hastens it is not.
        self.rtt_s = (1 - RISE) * (self.rtt_s or 0.0) + RISE * sample_s if rises else sample_s
        return sample_s


@dataclass(slots=True)
class PathMeasurement:
    """The path to one peer. Bandwidths in bits/s; times as of the clock."""

    rtts_s: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES_KEPT))
    up_bps: float = 0.0
    up_at_s: float = float("-inf")
    down_bps: float = 0.0
    down_at_s: float = float("-inf")
    heard_at_s: float = float("-inf")  # on the loop's clock
    arrivals: Arrivals = field(default_factory=Arrivals)

    @property
    def rtt_s(self) -> float | None:
        """The median of the last round trips."""
        return statistics.median_low(self.rtts_s) if self.rtts_s else None


class LinkStatistics:
    """Shared by all links of a node. Who has not been heard of for longest is forgotten first. `at_home`: whether a path to a peer
    stays in this node's own home, and says nothing of the line out of it."""

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
        """A PING was answered after so long."""
        path_measurement = self._of(peer)
        path_measurement.rtts_s.append(rtt_s)
        if self.on_rtt is not None and path_measurement.rtt_s is not None:
            self.on_rtt(peer, path_measurement.rtt_s)

    def heard(self, peer: PeerId, now_s: float) -> None:
        """Something came of the peer on any of our links to it; `now_s` is the loop's time."""
        path_measurement = self._peers.get(peer)
        (self._of(peer) if path_measurement is None else path_measurement).heard_at_s = now_s

    def heard_at_s(self, peer: PeerId) -> float:
        """When something came of it last."""
        path_measurement = self._peers.get(peer)
        return float("-inf") if path_measurement is None else path_measurement.heard_at_s

    def arrivals(self, peer: PeerId) -> Arrivals:
        """What all links to the peer count together."""
        return self._of(peer).arrivals

    def rtt_s(self, peer: PeerId) -> float | None:
        """The round trip to a peer, as far as it is known."""
        path_measurement = self._peers.get(peer)
        return None if path_measurement is None else path_measurement.rtt_s

    def expected_rtt_s(self, peer: PeerId) -> float | None:
        """The round trip to a peer that may never have been reached: measured, else guessed, else as to most others that were
        measured; None where nothing was."""
        rtt_s = self.rtt_s(peer)
        if rtt_s is None:
            rtt_s = self._guess(peer)
        if rtt_s is None:
            rtt_s = statistics.median_high(others) if (others := self.rtts_s().values()) else None
        return rtt_s

    def sent(self, peer: PeerId, rate_bps: float) -> None:
        """The peer has seen our large frames come in at this rate."""
        path_measurement = self._of(peer)
        path_measurement.up_bps, path_measurement.up_at_s = rate_bps, self._clock()

    def received(self, peer: PeerId, rate_bps: float) -> None:
        """Large frames of the peer have come in at this rate."""
        path_measurement = self._of(peer)
        path_measurement.down_bps, path_measurement.down_at_s = rate_bps, self._clock()

    def rtts_s(self, most: int | None = None) -> dict[PeerId, float]:
        """Round trips by peer, of those heard of last, at most so many."""
        known = {peer: rtt_s for peer, one in reversed(self._peers.items()) if (rtt_s := one.rtt_s) is not None}
        return dict(list(known.items())[:most])

    def up_bps_to(self, peer: PeerId) -> float:
        """How fast the peer has seen our large frames come in lately, in bits/s; 0 where none has."""
        path_measurement = self._peers.get(peer)
        is_fresh = path_measurement is not None and path_measurement.up_at_s >= self._clock() - FRESH_S
        return path_measurement.up_bps if path_measurement is not None and is_fresh else 0.0

    def ups_bps(self, most: int) -> dict[PeerId, float]:
        """`up_bps_to` of the peers heard of last that have seen large frames of ours lately, at most so many."""
        rates_bps = ((peer, self.up_bps_to(peer)) for peer in reversed(self._peers))
        return dict(islice(((peer, rate_bps) for peer, rate_bps in rates_bps if rate_bps > 0), most))

    @property
    def up_bps(self) -> float:
        """What this node can send, in bits/s; 0 where no large frame has left lately."""
        fresh_s = self._clock() - FRESH_S
        return self._capacity({peer: one.up_bps for peer, one in self._peers.items() if one.up_at_s >= fresh_s})

    @property
    def down_bps(self) -> float:
        """What this node can receive, in bits/s; 0 where no large frame has come lately."""
        fresh_s = self._clock() - FRESH_S
        return self._capacity({peer: one.down_bps for peer, one in self._peers.items() if one.down_at_s >= fresh_s})

    def rated_peers(self) -> set[PeerId]:
        """Whose paths were measured lately, both ways."""
        fresh_s = self._clock() - FRESH_S
        return {peer for peer, one in self._peers.items() if one.up_at_s >= fresh_s and one.down_at_s >= fresh_s}

    def _capacity(self, rates_bps: Mapping[PeerId, float]) -> float:
        """What the own access link carries: a path can be narrower than it, so the fast ones count; the upper quartile, so that
        a quarter of the peers may claim what they like. Paths at home count where there are no others."""
        away_bps = [rate_bps for peer, rate_bps in rates_bps.items() if not self.at_home(peer)]
        ranked = sorted(away_bps or rates_bps.values(), reverse=True)
        return ranked[len(ranked) // 4] if ranked else 0.0

    def _of(self, peer: PeerId) -> PathMeasurement:
        path_measurement = self._peers[peer] = self._peers.get(peer) or PathMeasurement()
        return path_measurement
