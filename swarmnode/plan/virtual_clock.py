"""Virtual time: seconds that pass as fast as their events can be computed."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable

Action = Callable[[], None]


class VirtualClock:
    """Clock of a simulation that runs planned actions in the order of their times; equal times keep the order of planning."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.events = 0  # number of actions that have run
        self._heap: list[tuple[float, int, Action]] = []
        self._numbers = itertools.count()

    def at(self, time_s: float, action: Action) -> None:
        """Plan `action` for the time `time_s`, or for now if that time has passed."""
        heapq.heappush(self._heap, (max(time_s, self.now_s), next(self._numbers), action))

    def after(self, delay_s: float, action: Action) -> None:
        """Plan `action` for `delay_s` seconds from now."""
        self.at(self.now_s + delay_s, action)

    def run(self, until_s: float) -> None:
        """Run all actions planned up to `until_s` and set the clock to `until_s`."""
        self._happen(until_s)
        self.now_s = max(self.now_s, until_s)

    def run_out(self) -> None:
        """Run all planned actions, and the actions that they plan, until none is left."""
        self._happen(math.inf)

    def _happen(self, until_s: float) -> None:
        heap = self._heap
        while heap and heap[0][0] <= until_s:
            self.now_s, _, action = heapq.heappop(heap)
            self.events += 1
            action()
