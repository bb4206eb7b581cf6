"""The model of a training step: its microbatches go through stages and links in virtual time, wired and computed as they will be.

Stages compute one pass at a time, gradients first; links carry one message after another; each microbatch that is back makes room
for the next. So what a step takes follows from what its peers and links can do, down to the peers that finish last. Averaging
comes on top (`step_forecast.py`). Where peers choose their places, the coordinator expects a step and the simulator carries
one out it is these passes that count; the simulator alone knows of losses, and of links as they really are.
"""

from __future__ import annotations

import heapq
import itertools
import math
import statistics
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import IntEnum
from functools import partial

from swarmnode.net.interfaces import PeerId
from swarmnode.plan.training.wiring import Replica, Transfers, Wire, book, keep_busy, wire
from swarmnode.plan.virtual_clock import Action, VirtualClock

FULL_PLAY = 128  # microbatches that go through; further ones take what those in the middle take
FORWARD_SHARE = 1 / 3  # of what a unit takes there and back
LONGEST_S = 1e8  # three years: a longer forecast means nothing
REMEMBERED = 5  # past steps that correct the next forecast


def passing_s(units: int, workers: Mapping[PeerId, Replica], transfers: Transfers, microbatches: int) -> float:
    """Return the seconds until `microbatches` have gone through the stages and back, as if nothing were booked. Infinite if a layer
    has no holder, or holders cannot do all of them."""
    played = min(microbatches, FULL_PLAY)
    ends_s = _Play(units, workers, transfers, played).run()
    if len(ends_s) < played:
        return math.inf
    middle_s = (ends_s[3 * played // 4 - 1] - ends_s[played // 4 - 1]) / (played // 2) if microbatches > played else 0.0
    return ends_s[-1] + (microbatches - played) * middle_s


class Way(IntEnum):
    """Ways through the model: a pass of either is computed of each microbatch, that of the most urgent way first
    (`compute/executor.py`)."""

    BACKWARD = 0
    FORWARD = 1


class Bench:
    """Computation of a peer in a step: one pass at a time, gradients before new microbatches. `began`: called with the
    seconds of each pass as it begins."""

    def __init__(self, clock: VirtualClock, began: Callable[[float], None] = lambda _takes_s: None) -> None:
        self._clock = clock
        self._began = began
        self._jobs: list[tuple[Way, int, float, Action]] = []
        self._numbers = itertools.count()
        self._is_busy = False
        self._is_stopped = False

    def submit(self, way: Way, takes_s: float, done: Action) -> None:
        """Queue a pass of `takes_s` seconds in the direction `way`, and call `done` after it."""
        heapq.heappush(self._jobs, (way, next(self._numbers), takes_s, done))
        if not self._is_busy:
            self._next()

    def stop(self) -> None:
        """Drop all queued passes, and the result of the one in progress."""
        self._is_stopped = True
        self._jobs.clear()

    def _next(self) -> None:
        if self._jobs:
            _, _, takes_s, done = heapq.heappop(self._jobs)
            self._is_busy = True
            self._began(takes_s)
            self._clock.after(takes_s, partial(self._finish, done))

    def _finish(self, done: Action) -> None:
        if self._is_stopped:
            return
        self._is_busy = False
        done()
        if not self._is_busy:
            self._next()


class Passage(ABC):
    """A microbatch on its way over the `benches` of its route: forward, and its gradient back. `counted`: the hops that have its
    gradient."""

    def __init__(self, benches: Sequence[Bench]) -> None:
        self._benches = benches
        self.counted: set[int] = set()
        self.called_back = False

    @abstractmethod
    def takes_s(self, way: Way, hop: int) -> float:
        """Return the seconds that a microbatch takes at a hop, in the direction `way`."""

    @abstractmethod
    def hand_on(self, way: Way, sender: int, receiver: int) -> None:
        """Send a hop's result to the next hop, and call `arrived` for that hop on arrival."""

    @abstractmethod
    def done(self) -> None:
        """Handle that the gradient is back at the first hop."""

    def arrived(self, way: Way, hop: int) -> None:
        """Queue the microbatch at hop `hop`, to be computed in the direction `way`."""
        self._benches[hop].submit(way, self.takes_s(way, hop), partial(self._computed, way, hop))

    def _computed(self, way: Way, hop: int) -> None:
        if self.called_back:
            return
        if way is Way.BACKWARD:
            self.counted.add(hop)
        if way is Way.FORWARD and hop + 1 == len(self._benches):
            self.arrived(Way.BACKWARD, hop)
        elif way is Way.BACKWARD and hop == 0:
            self.done()
        else:
            self.hand_on(way, hop, hop + 1 if way is Way.FORWARD else hop - 1)


class _Play:
    """Simulation of microbatches through idle copies of `workers`."""

    def __init__(self, units: int, workers: Mapping[PeerId, Replica], transfers: Transfers, microbatches: int) -> None:
        self.workers = {peer: replace(worker, booked_units=0, in_flight=0) for peer, worker in workers.items()}
        self._transfers, self._clock = transfers.idle(), VirtualClock()
        keep_busy(units, self.workers, self._transfers)
        self.benches = {peer: Bench(self._clock) for peer in workers}
        self.lines = transfers.lines(self._clock)
        self._fixed: Sequence[PeerId | None] = [None] * units
        self._left = microbatches
        self._ends_s: list[float] = []

    def run(self) -> Sequence[float]:
        """Run the simulation, and return the times in seconds at which the microbatches were back, in order."""
        self._lease()
        self._clock.run_out()
        return self._ends_s

    def _lease(self) -> None:
        while self._left:
            route = wire(self.workers, self._fixed, self._transfers, left=self._left)
            if route is None:
                return
            self._left -= 1
            book(route, self.workers, self._transfers, 1)
            _PlayedMicrobatch(self, route).arrived(Way.FORWARD, 0)

    def done(self, route: Sequence[Wire]) -> None:
        """Release the bookings of a microbatch that is back, record its time, and send the next ones."""
        book(route, self.workers, self._transfers, -1)
        self._ends_s.append(self._clock.now_s)
        self._lease()


class _PlayedMicrobatch(Passage):
    """Microbatch of a simulated step on its route through the stages."""

    def __init__(self, play: _Play, route: Sequence[Wire]) -> None:
        super().__init__([play.benches[peer] for peer, _ in route])
        self._play, self._route = play, route

    def takes_s(self, way: Way, hop: int) -> float:
        """Return the seconds that the stage at `hop` computes for this microbatch in one direction: its share of the forward and
        backward pass."""
        peer, span = self._route[hop]
        share = FORWARD_SHARE if way is Way.FORWARD else 1 - FORWARD_SHARE
        return share * span.units * self._play.workers[peer].assumed_unit_s

    def hand_on(self, way: Way, sender: int, receiver: int) -> None:
        """Send the microbatch from hop `sender` to hop `receiver` over the simulated links, in the direction `way`."""
        here, there = self._route[sender][0], self._route[receiver][0]
        self._play.lines.send(here, there, partial(self.arrived, way, receiver))

    def done(self) -> None:
        """Report to the simulation that this microbatch is back."""
        self._play.done(self._route)


class ExpectedStep:
    """Expected seconds of a run's next step: its forecast times the median ratio of real to forecast seconds of the last steps,
    since no forecast includes trainers, updates and commands. `expected_s`: seconds of the current step; 0 if unknown."""

    def __init__(self) -> None:
        self.expected_s = 0.0
        self._forecast_s = 0.0
        self._ratios = deque([1.0], maxlen=REMEMBERED)  # a first step, which warms up, is not believed alone

    @property
    def correction(self) -> float:
        """Median ratio of real to forecast seconds over the last steps."""
        return statistics.median(self._ratios)

    def begin(self, forecast_s: float) -> None:
        """Begin a step with this forecast. Peers report their own speeds, so a forecast that is not positive, or not below
        `LONGEST_S`, is ignored."""
        self._forecast_s = forecast_s if 0 < forecast_s < LONGEST_S else 0.0
        self.expected_s = min(self._forecast_s * self.correction, LONGEST_S)

    def end(self, step_s: float, forecast_s: float = 0.0) -> None:
        """Learn from a step that took `step_s`. `forecast_s`: the forecast of that step by present knowledge; 0 if there is
        none, then the forecast from its beginning counts. So the errors of estimates before the first step are not learnt."""
        forecast_s = forecast_s if 0 < forecast_s < LONGEST_S else self._forecast_s
        if forecast_s > 0 and step_s > 0:
            self._ratios.append(step_s / forecast_s)
