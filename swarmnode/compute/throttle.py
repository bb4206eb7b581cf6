"""A device made slower than it is, so that peers of unequal speed can be had on one machine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PREFILL_GAIN = 16.0  # a long prompt chunk uses a device about so much better than a single position


class Throttle:
    """Lets passes take at least as long as on a device that does `units_per_s` of single positions; infinity changes nothing.

    All rows of a decode pass count as one, as its cost is that of reading the weights. Used from one thread.
    """

    def __init__(
        self,
        units_per_s: float = math.inf,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not units_per_s > 0:
            raise ValueError(f"a throttle of {units_per_s} units/s")
        self.units_per_s = units_per_s
        self._clock = clock
        self._sleep = sleep

    def __repr__(self) -> str:
        return f"Throttle({self.units_per_s:g} units/s)"

    def least_s(self, units: int, positions: int) -> float:
        """Seconds that `units` take for so many positions: 1 is a decode pass, more are a prompt chunk."""
        passes = 1.0 if positions == 1 else max(1.0, positions / PREFILL_GAIN)
        return units * passes / self.units_per_s

    @contextmanager
    def pass_over(self, units: int, positions: int) -> Iterator[None]:
        """Around one pass: what the real device needed is part of the time."""
        began_s = self._clock()
        yield
        rest_s = self.least_s(units, positions) - (self._clock() - began_s)
        if rest_s > 0:
            self._sleep(rest_s)
