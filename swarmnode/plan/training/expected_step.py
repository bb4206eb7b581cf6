"""What a run's next step will take, from what its stages have measured.

Its microbatches are wired as they will be, and all that is booked is added up: the busiest stage or link has to do all of its own,
and the way of one microbatch through the others comes on top; where stages have room for few at once, that decides.
What else there is (trainers, updates, commands) is learnt: a step is corrected by how far off the last ones were.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence

from swarmnode.net.interfaces import PeerId
from swarmnode.plan.training.rehearsal import rehearse
from swarmnode.plan.training.transfers import Transfers
from swarmnode.plan.training.wiring import ENDLESS, Replica, Wire

LONGEST_S = 1e8  # three years: nobody waits for it, and it means nothing
REMEMBERED = 5  # steps by which the next one is corrected


class ExpectedStep:
    """Of one run. `expected_s`: of the step in force; 0 where nothing is known."""

    def __init__(self) -> None:
        self.expected_s = 0.0
        self._forecast_s = 0.0
        self._ratios = deque([1.0], maxlen=REMEMBERED)  # a first step, which warms up, is not believed alone

    def __repr__(self) -> str:
        return f"<ExpectedStep {self.expected_s:.3f} s, {self.correction:.2f} times what was forecast>"

    @property
    def correction(self) -> float:
        """How many times as long as forecast the last steps took."""
        return statistics.median(self._ratios)

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
    played = rehearse(units, workers, transfers, microbatches)
    if played is None:
        return 0.0
    under_way = sum(_room(route, workers) for route in {route[0][0]: route for route in played.routes}.values())
    return max((microbatches - 1) * played.beat_s + played.way_s, microbatches * played.way_s / under_way)


def _room(route: Sequence[Wire], workers: Mapping[PeerId, Replica]) -> int:
    """For microbatches on it at once, as far as that is known."""
    return min(workers[peer].window or ENDLESS for peer, _ in route)
