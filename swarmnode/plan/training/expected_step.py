"""What a run's next step will take, from what its stages have measured.

Its microbatches are wired as they will be, and all that is booked is added up: the busiest stage or link has to do all of its own,
and the way of one microbatch through the others comes on top; where a microbatch is long under way, how many may be so decides.
What else there is (trainers, updates, commands) is learnt: a step is corrected by how far off the last ones were.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

from swarmnode.net.interfaces import PeerId
from swarmnode.plan.training.transfers import Transfers
from swarmnode.plan.training.wiring import ENDLESS, Replica, Wire, book, wire

PLAYED = 32  # microbatches that are wired: more of them go the same ways
LONGEST_S = 1e8  # three years: nobody waits for it, and it means nothing
REMEMBERED = 5  # steps by which the next one is corrected


class ExpectedStep:
    """Of one run. `expected_s`: of the step in force; 0 where nothing is known."""

    def __init__(self) -> None:
        self.expected_s = 0.0
        self._forecast_s = 0.0
        self._ratios: deque[float] = deque(maxlen=REMEMBERED)

    def __repr__(self) -> str:
        return f"<ExpectedStep {self.expected_s:.3f} s, {self.correction:.2f} times what was forecast>"

    @property
    def correction(self) -> float:
        """How many times as long as forecast the last steps took."""
        return statistics.median(self._ratios) if self._ratios else 1.0

    def begin(self, forecast_s: float) -> None:
        """A step begins, of which this is forecast: what peers tell of themselves may make it anything."""
        self._forecast_s = forecast_s if 0 < forecast_s < LONGEST_S else 0.0
        self.expected_s = min(self._forecast_s * self.correction, LONGEST_S)

    def end(self, step_s: float, forecast_s: float = 0.0) -> None:
        """It took so long. `forecast_s`: what would be forecast of it by what is known now; 0 where nothing is. So the first step,
        which stages could only estimate, teaches what their measurements miss, and not what their estimates did."""
        forecast_s = forecast_s if 0 < forecast_s < LONGEST_S else self._forecast_s
        if forecast_s > 0 and step_s > 0:
            self._ratios.append(step_s / forecast_s)


def passing_s(units: int, workers: Mapping[PeerId, Replica], transfers: Transfers, microbatches: int) -> float:
    """Until so many microbatches have gone through the stages and back, as if nothing were booked; 0 where units have nobody."""
    idle = {peer: replace(worker, booked_units=0, in_flight=0, window=0) for peer, worker in workers.items()}
    links = transfers.idle()
    routes: list[Sequence[Wire]] = []
    for _ in range(min(microbatches, PLAYED)):
        route = wire(units, idle, [None] * units, links, in_flight=ENDLESS)
        if route is None:
            return 0.0
        routes.append(route)
        book(route, idle, links, 1)
    scale = microbatches / len(routes)
    busiest_s = scale * max(links.busiest_s(), *(worker.finish_s(0) for worker in idle.values()))
    way_s = statistics.fmean(_way_s(route, workers, transfers.idle()) for route in routes)
    under_way = sum(_at_once(route, workers) for route in {route[0][0]: route for route in routes}.values())
    return max(busiest_s + way_s - busiest_s / microbatches, microbatches * way_s / under_way)


def _at_once(route: Sequence[Wire], workers: Mapping[PeerId, Replica]) -> int:
    """Microbatches that may be under way on it: one more than it has hops, as far as all have room."""
    return min(len(route) + 1, *(workers[peer].window or ENDLESS for peer, _ in route))


def _way_s(route: Sequence[Wire], workers: Mapping[PeerId, Replica], links: Transfers) -> float:
    """Of one microbatch alone, there and back."""
    peers = [peer for peer, _ in route]
    hops_PP = links.there_and_back_s(peers)
    hops_s = sum(float(hops_PP[place, place + 1]) for place in range(len(peers) - 1))
    return hops_s + sum(span.units * workers[peer].assumed_unit_s for peer, span in route)
