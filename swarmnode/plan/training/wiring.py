"""Which way a microbatch goes: through the replicas that will be done with it first.

Each peer is booked for what was sent to it and has not come back (virtual finish times, as SWARM does, 2301.11913 section 3.2,
with measured seconds per unit); a route is the cheapest chain of spans, mid-span entry included. So a peer with half the
speed gets half the work.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swarmnode.net.interfaces import PeerId
from swarmnode.plan.view import Span

UNMEASURED_UNIT_S = 0.01


@dataclass
class Replica:
    """A peer that may take microbatches: `unit_s` seconds for one through one unit, `booked_units` sent and not back."""

    span: Span
    unit_s: float = 0.0
    booked_units: int = 0
    in_flight: int = 0
    window: int = 0  # microbatches that it has room for at once; 0: not known

    def is_free(self, in_flight: int) -> bool:
        """Whether it takes one more, where nobody is given more than `in_flight`."""
        return self.in_flight < (min(in_flight, self.window) if self.window else in_flight)

    def finish_s(self, units: int) -> float:
        """When it would be done with so many units more."""
        return (self.booked_units + units) * (self.unit_s or UNMEASURED_UNIT_S)


Wire = tuple[PeerId, Span]


def wire(
    units: int, workers: Mapping[PeerId, Replica], fixed: Sequence[PeerId | None], *, in_flight: int
) -> list[Wire] | None:
    """The route of one microbatch; None where all who could take it have `in_flight` already, or nobody holds a unit.

    `fixed` names, for each unit, the peer that it must pass there, if any.
    """
    free = {peer: worker for peer, worker in workers.items() if worker.is_free(in_flight)}
    begins = sorted({worker.span.start for worker in free.values()})  # where one may hand over early
    reaches = [(peer, worker, _reach(peer, worker.span, fixed)) for peer, worker in sorted(free.items())]
    nowhere: list[Wire] = []
    best = [(math.inf, nowhere)] * units + [(0.0, nowhere)]
    for start in range(units - 1, -1, -1):
        for peer, worker, reach in reaches:
            end = reach.get(start, start)
            for stop in (end, *(begin for begin in begins if start < begin < end)) if start < end else ():
                rest_s, rest = best[stop]
                if rest_s < math.inf and not (rest and rest[0][0] == peer):
                    cost_s = worker.finish_s(stop - start) + rest_s
                    if cost_s < best[start][0]:
                        best[start] = (cost_s, [(peer, Span(start, stop)), *rest])
    return best[0][1] or None


def _reach(peer: PeerId, span: Span, fixed: Sequence[PeerId | None]) -> dict[int, int]:
    """How far a peer may take a microbatch that enters at a unit, by unit: to where its span or its claim on it ends."""
    ends: dict[int, int] = {}
    for unit in range(span.end - 1, span.start - 1, -1):
        if fixed[unit] in (None, peer):
            ends[unit] = ends.get(unit + 1, unit + 1)
    return ends
