"""Paths of a node: round trips, bandwidths, its network coordinate and reachability; and the latency of other peers as sessions
observe it.

Timing of peers while they work: in a session every peer is timed by the one before it.

A hop sends RAN when a step has left it. The sender of that step then knows its duration: the time between sending and RAN, less the
link's round trip. RAN also carries the hop's own measurements of the hops after it. So after a few tokens the client knows the
speed of every peer of its route, as measured by that peer's neighbour. In a ring the last hop times the first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swarmnode.codec.body import HopSpec
from swarmnode.codec.measuring_messages import MAX_UNIT_US, Ran
from swarmnode.links.link_statistics import MAX_ERROR, Coordinate, LinkStatistics, OwnCoordinate
from swarmnode.net.addressing.addresses import home_of
from swarmnode.net.addressing.reachability import Evidence, Reachability, conclude, own_interfaces
from swarmnode.net.fair_share import Recent
from swarmnode.net.interfaces import PeerId
from swarmnode.swarm.records.announcement import (
    MAX_PATHS,
    MAX_RTTS,
    MAX_UNIT_TIMES,
    Announcement,
    ObservedSpeeds,
    PathNews,
    peer_digest,
)

MOST_KBPS = (1 << 32) - 1  # largest rate in an announcement

PEERS_KEPT = 256
FRESH_S = 600.0  # older measurements say little; the peer's announced speed counts again
# Weights of a new measurement: a slow step may have waited for others, a quick one shows the peer's speed.
RISE, FALL = 0.2, 0.5

Known = Callable[[PeerId], Announcement | None]
"""Function that returns a peer's current announcement; None if the peer is not known."""


@dataclass(slots=True)
class _Seen:
    unit_s: float
    at_s: float


class ObservedLatency:
    """Seconds for one position through one layer, by peer: moving averages of measurements by this node and by the peers'
    neighbours. Bounded."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: Recent[PeerId, _Seen] = Recent(PEERS_KEPT)

    def saw(self, peer: PeerId, unit_s: float) -> None:
        """Record that one position took `unit_s` seconds per layer on `peer`. The peer measured least recently is forgotten
        first."""
        now_s = self._clock()
        seen = self._seen.get(peer)
        if seen is None or now_s - seen.at_s > FRESH_S:
            seen = _Seen(unit_s, now_s)
        weight = RISE if unit_s > seen.unit_s else FALL
        self._seen[peer] = _Seen(seen.unit_s + weight * (unit_s - seen.unit_s), now_s)

    def unit_s(self, peer: PeerId) -> float | None:
        """Return the seconds of one position through one layer on `peer`; None without a fresh measurement."""
        seen = self._seen.get(peer)
        return None if seen is None or self._clock() - seen.at_s > FRESH_S else seen.unit_s

    def section(self) -> ObservedSpeeds:
        """Return the section for the announcement: microseconds per layer, by the digests of the peers."""
        seen = self.units_s(most=MAX_UNIT_TIMES)
        return ObservedSpeeds(
            unit_us={peer_digest(peer): max(1, min(round(unit_s * 1e6), MAX_UNIT_US)) for peer, unit_s in seen.items()}
        )

    def units_s(self, most: int | None = None) -> dict[PeerId, float]:
        """Return the seconds per layer of at most `most` peers (None: all), those measured last first."""
        known = {peer: unit_s for peer in reversed(self._seen) if (unit_s := self.unit_s(peer)) is not None}
        return dict(list(known.items())[:most])


class Paths:
    """Measurements of the paths between this peer and others. Links feed them by ordinary traffic (`link_statistics`);
    announcements carry them (`section`)."""

    def __init__(self, peer: PeerId, announcement_of: Known, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.link_statistics = LinkStatistics(
            clock=clock, on_rtt=self._measured, guess=self._by_coordinates, at_home=self._is_at_home
        )
        self._peer = peer
        self.reachability = Reachability.UNKNOWN
        self._surveyor = OwnCoordinate(peer)
        self._announcement_of = announcement_of

    def __repr__(self) -> str:
        return f"<Paths {self.reachability.name} at {self.coordinate!r}, {self.link_statistics!r}>"

    @property
    def coordinate(self) -> Coordinate:
        """Network coordinate of this peer."""
        return self._surveyor.coordinate

    def _measured(self, peer: PeerId, rtt_s: float) -> None:
        """Adjust the own coordinate by a round trip to a peer that announces its coordinate; clients, for example, do not."""
        announcement = self._announcement_of(peer)
        if announcement is not None:
            self._surveyor.measured(Coordinate.unpacked(announcement.coordinate), rtt_s)

    def _is_at_home(self, peer: PeerId) -> bool:
        """Return whether `peer` and this node announce the same public address, so that both are behind one line."""
        own, other = self._announcement_of(self._peer), self._announcement_of(peer)
        home = "" if own is None else home_of(own.addresses)
        return bool(home) and other is not None and home_of(other.addresses) == home

    def _by_coordinates(self, peer: PeerId) -> float | None:
        announcement = self._announcement_of(peer)
        theirs = None if announcement is None else Coordinate.unpacked(announcement.coordinate)
        if theirs is None or self.coordinate.error >= MAX_ERROR:
            return None
        return self.coordinate.rtt_ms(theirs) / 1e3

    def check_reachability(
        self, addresses: Sequence[str], promised: Sequence[str], visitors: Sequence[str]
    ) -> Evidence:
        """Determine this peer's reachability anew (`net/addressing/reachability.py`) and return the evidence for it."""
        evidence = Evidence(addresses, own_interfaces(), promised, visitors)
        self.reachability = conclude(evidence)
        return evidence

    def section(self) -> PathNews:
        """Return the section for the announcement: round trips, bandwidths, coordinate and reachability."""
        rtts_s = self.link_statistics.rtts_s(most=MAX_RTTS)
        ups_bps = self.link_statistics.ups_bps(most=MAX_PATHS)
        return PathNews(
            rtt_us={peer_digest(peer): round(rtt_s * 1e6) for peer, rtt_s in rtts_s.items()},
            coordinate=self.coordinate.packed(),
            up_bps=self.link_statistics.up_bps,
            down_bps=self.link_statistics.down_bps,
            reachability=int(self.reachability),
            path_kbps={peer_digest(peer): min(round(bps / 1e3), MOST_KBPS) for peer, bps in ups_bps.items()},
        )


EAGER_STEPS = 8  # the first steps of a session are all timed
EVERY_STEPS = 16  # then one in this many: a frame of some 20 bytes each
SHORTEST_S = 1e-6
BUNCH = 8  # outputs over which a ring of one hop is timed: the network may bring several at once


class Timing:
    """Timing of one session at one place of its route, for one epoch. The client is at place -1, before the first hop."""

    def __init__(
        self,
        route: Sequence[HopSpec],
        place: int,
        observed_latency: ObservedLatency,
        clock: Callable[[], float],
        *,
        ring: bool,
    ) -> None:
        around = route[: max(place, 0) + 1] if ring and len(route) > 1 else ()
        self._following = (*route[place + 1 :], *around)
        self._observed_latency = observed_latency
        self._clock = clock
        self._sent: tuple[int, float] = (0, 0.0)  # the position after the step sent last, and when
        self._later_us: tuple[int, ...] = ()
        self._steps = 0

    def sent(self, end: int) -> None:
        """Note that the step that ends at position `end` was sent to the next hop, alone."""
        self._sent = (end, self._clock())

    def record_report(self, end: int, ran: Ran, rtt_s: float | None) -> None:
        """Take the next hop's report (RAN) that the step which ends at position `end` has left it, with the time per layer of
        the hops behind it. `rtt_s` is the link's round trip, None if unmeasured."""
        if not self._following:
            return
        following, (sent_end, sent_at_s) = self._following[0], self._sent
        if end == sent_end and rtt_s is not None:
            elapsed_s = max(self._clock() - sent_at_s - rtt_s, SHORTEST_S)
            self._observed_latency.saw(following.peer, elapsed_s / (following.end - following.start))
        unit_s = self._observed_latency.unit_s(following.peer) or 0.0
        self._later_us = (min(round(unit_s * 1e6), MAX_UNIT_US), *ran.later_us)[: len(self._following)]

    def learn(self, ran: Ran) -> None:
        """Take, at the client, the hops' measurements of the hops after them."""
        for hop, unit_us in zip(self._following[1:], ran.later_us, strict=False):
            if unit_us:
                self._observed_latency.saw(hop.peer, unit_us / 1e6)

    def step(self) -> Ran | None:
        """Count a step that has left this hop. Returns the RAN for its sender; None if it is not due."""
        self._steps += 1
        if self._steps > EAGER_STEPS and self._steps % EVERY_STEPS:
            return None
        return Ran(self._later_us)


class Cadence:
    """Timing of the only hop of a ring by the client, its only neighbour, from its outputs."""

    def __init__(self, hop: HopSpec, observed_latency: ObservedLatency, clock: Callable[[], float]) -> None:
        self._hop = hop
        self._observed_latency = observed_latency
        self._clock = clock
        self._first: tuple[int, float] | None = None  # position and time at which this bunch began
        self._last = 0

    def record_output(self, position: int) -> None:
        """Note that the output for this position arrived."""
        now_s = self._clock()
        if self._first is None or position != self._last + 1:
            self._first = (position, now_s)
        elif position - self._first[0] == BUNCH:
            units = self._hop.end - self._hop.start
            self._observed_latency.saw(self._hop.peer, max((now_s - self._first[1]) / BUNCH, SHORTEST_S) / units)
            self._first = (position, now_s)
        self._last = position
