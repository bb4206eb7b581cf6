"""Timing of peers while they work: in a session every peer is timed by the one before it.

A hop sends RAN when a step has left it. The sender of that step then knows its duration: the time between sending and RAN, less the
link's round trip. RAN also carries the hop's own measurements of the hops after it. So after a few tokens the client knows the
speed of every peer of its route, as measured by that peer's neighbour. In a ring the last hop times the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from swarmnode.codec.body import HopSpec
from swarmnode.codec.measuring_messages import MAX_UNIT_US, Ran
from swarmnode.peer.paths import ObservedLatency

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

    def heard(self, end: int, ran: Ran, rtt_s: float | None) -> None:
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

    def heard(self, position: int) -> None:
        """Note that the output for this position arrived."""
        now_s = self._clock()
        if self._first is None or position != self._last + 1:
            self._first = (position, now_s)
        elif position - self._first[0] == BUNCH:
            units = self._hop.end - self._hop.start
            self._observed_latency.saw(self._hop.peer, max((now_s - self._first[1]) / BUNCH, SHORTEST_S) / units)
            self._first = (position, now_s)
        self._last = position
