"""A rehearsal of a step: its microbatches are wired through stages and links of which nothing is booked.

It tells what holds the step up, and how many microbatches a stage has to have at once in order not to wait for any: by Little's
law (1961) as many as it does while one is on its way through all stages.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from swarmnode.net.interfaces import PeerId
from swarmnode.plan.training.transfers import Transfers
from swarmnode.plan.training.wiring import ENDLESS, Replica, Wire, book, wire

PLAYED = 32  # microbatches that are wired: more of them go the same ways
QUEUES = 1.5  # times as long on its way as if it met nobody, between stages of unequal speeds
BELIEVED = 4.0  # times the usual speed, at most, that who says that it is fast is given microbatches for


@dataclass(frozen=True)
class Rehearsal:
    """`routes` of microbatches; for each of them the peer that has most to do needs `peer_s`, and the path or line that has most to
    carry `line_s`; one alone is `way_s` under way, there and back. `paces_s`: of each peer, what it, or what it sends by, needs
    for a microbatch."""

    routes: Sequence[Sequence[Wire]]
    peer_s: float
    line_s: float
    way_s: float
    paces_s: Mapping[PeerId, float]

    @property
    def beat_s(self) -> float:
        """What holds each microbatch up."""
        return max(self.peer_s, self.line_s)


def keep_busy(units: int, workers: Mapping[PeerId, Replica], transfers: Transfers) -> None:
    """Let each have as many microbatches at once as it does while one is on its way, and one. Where units have nobody nothing
    changes."""
    played = rehearse(units, workers, transfers)
    if played is not None:
        for peer, pace_s in played.paces_s.items():
            workers[peer].at_once = 1 + math.ceil(min(QUEUES * played.way_s / pace_s, ENDLESS))


def rehearse(
    units: int, workers: Mapping[PeerId, Replica], transfers: Transfers, microbatches: int = PLAYED
) -> Rehearsal | None:
    """So many microbatches (of more than 32 the first ones); None where units have nobody."""
    idle = {peer: replace(worker, booked_units=0, in_flight=0, at_once=0, window=0) for peer, worker in workers.items()}
    links = transfers.idle()
    routes: list[tuple[Wire, ...]] = []
    for _ in range(min(microbatches, PLAYED)):
        route = wire(idle, [None] * units, links)
        if route is None:
            return None
        routes.append(tuple(route))
        book(route, idle, links, 1)
    peer_s = max(worker.finish_s(0) for worker in idle.values()) / len(routes)
    line_s = links.busiest_s() / len(routes)
    alone = transfers.idle()
    ways_s = {route: _way_s(route, workers, alone) for route in set(routes)}
    way_s = statistics.fmean(ways_s[route] for route in routes)
    return Rehearsal(routes, peer_s, line_s, way_s, _paces_s(idle, links))


def _paces_s(played: Mapping[PeerId, Replica], links: Transfers) -> dict[PeerId, float]:
    """By what each has done in the rehearsal."""
    usual_s = statistics.median(worker.assumed_unit_s for worker in played.values())
    return {
        peer: max(
            worker.span.units * max(worker.assumed_unit_s, usual_s / BELIEVED),
            links.busy_s(peer) / max(1, worker.in_flight),
        )
        for peer, worker in played.items()
    }


def _way_s(route: Sequence[Wire], workers: Mapping[PeerId, Replica], links: Transfers) -> float:
    """Of one microbatch alone, there and back."""
    peers = [peer for peer, _ in route]
    hops_PP = links.there_and_back_s(peers)
    hops_s = sum(float(hops_PP[place, place + 1]) for place in range(len(peers) - 1))
    return hops_s + sum(span.units * workers[peer].assumed_unit_s for peer, span in route)
