"""Timing: in a session every peer is timed by the one before it, while it works.

A hop says RAN when a step has left it. Whoever sent it that step knows how long it took: from sending to hearing, less
the link's round trip. RAN also carries what the hop itself measured of those after it, so after a few tokens the client
knows every peer of its route by the word of that peer's neighbour. In a ring the last hop times the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from swarmnode.codec.body import HopSpec
from swarmnode.codec.measuring_messages import MAX_UNIT_US, Ran
from swarmnode.peer.paths import ObservedLatency

EAGER_STEPS = 8  # of a session are all timed, then
EVERY_STEPS = 16  # one in so many: a frame of some 20 bytes each
SHORTEST_S = 1e-6
BUNCH = 8  # outputs of a ring of one hop, over which it is timed: the network may bring several at once


class Timing:
    """One session's timing at one place of its route, for one epoch. The client is at place -1, before the first hop."""

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

    def __repr__(self) -> str:
        return f"<Timing of {len(self._following)} hops after this one: {self._later_us} µs a unit>"

    def sent(self, end: int) -> None:
        """The step that ends at position `end` was sent to the next hop, alone."""
        self._sent = (end, self._clock())

    def heard(self, end: int, ran: Ran, rtt_s: float | None) -> None:
        """The next hop ran everything below position `end`."""
        if not self._following:
            return
        following, (sent_end, sent_at_s) = self._following[0], self._sent
        if end == sent_end and rtt_s is not None:
            elapsed_s = max(self._clock() - sent_at_s - rtt_s, SHORTEST_S)
            self._observed_latency.saw(following.peer, elapsed_s / (following.end - following.start))
        unit_s = self._observed_latency.unit_s(following.peer) or 0.0
        self._later_us = (min(round(unit_s * 1e6), MAX_UNIT_US), *ran.later_us)[: len(self._following)]

    def learn(self, ran: Ran) -> None:
        """At the client: believe what the hops say of those after them."""
        for hop, unit_us in zip(self._following[1:], ran.later_us, strict=False):
            if unit_us:
                self._observed_latency.saw(hop.peer, unit_us / 1e6)

    def step(self) -> Ran | None:
        """A step has left this hop: what to tell whoever sent it, if it is time to."""
        self._steps += 1
        if self._steps > EAGER_STEPS and self._steps % EVERY_STEPS:
            return None
        return Ran(self._later_us)


class Cadence:
    """The only hop of a ring has no neighbour but the client, which times it by its outputs."""

    def __init__(self, hop: HopSpec, observed_latency: ObservedLatency, clock: Callable[[], float]) -> None:
        self._hop = hop
        self._observed_latency = observed_latency
        self._clock = clock
        self._first: tuple[int, float] | None = None  # position and time at which this bunch began
        self._last = 0

    def __repr__(self) -> str:
        return f"<Cadence of {self._hop.peer[-8:]} at position {self._last}>"

    def heard(self, position: int) -> None:
        """The output for this position came."""
        now_s = self._clock()
        if self._first is None or position != self._last + 1:
            self._first = (position, now_s)
        elif position - self._first[0] == BUNCH:
            units = self._hop.end - self._hop.start
            self._observed_latency.saw(self._hop.peer, max((now_s - self._first[1]) / BUNCH, SHORTEST_S) / units)
            self._first = (position, now_s)
        self._last = position
