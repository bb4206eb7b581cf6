"""Throttle: slows a device down, because its owner lends a share of it, or to have peers of unequal speed on one machine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

MOST_OVERSLEPT_S = (
    1.0  # most excess sleep that later passes make up for; after a machine's suspension the rest is ignored
)
PREFILL_GAIN = 16.0  # positions per second in a prompt chunk or microbatch, relative to single ones
FORWARD_WORK, BACKWARD_WORK = 1.0, 2.0  # of a microbatch, in passes of a prompt chunk
TRAINING_WORK = FORWARD_WORK + BACKWARD_WORK


class Throttle:
    """Throttle of one device. Used from one thread.

    A pass takes at least as long as on a device that does `units_per_s` layers of single positions (infinity: no limit). The device
    then rests, so that it is busy for a `share` of the time (its duty cycle) while there is work. Later rests make up for
    sleeps that were too long. All rows of a decode pass count as one position, as its cost is that of reading the weights.
    """

    def __init__(
        self,
        units_per_s: float = math.inf,
        share: float = 1.0,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not units_per_s > 0:
            raise ValueError(f"units_per_s is {units_per_s}: it must be above 0")
        if not 0 < share <= 1:
            raise ValueError(f"share is {share}: it must be above 0 and at most 1")
        self.units_per_s = units_per_s
        self.share = share
        self._owed_s = 0.0  # rest still due; negative after sleeps that were too long
        self._clock = clock
        self._sleep = sleep

    def __repr__(self) -> str:
        return f"Throttle({self.units_per_s:g} units/s, {self.share:.0%} of the time)"

    def least_s(self, units: int, positions: int) -> float:
        """Return the least seconds for `units` layers of `positions` positions: 1 means a decode pass, more a prompt chunk."""
        passes = 1.0 if positions == 1 else max(1.0, positions / PREFILL_GAIN)
        return units * passes / self.units_per_s

    def least_of_work_s(self, work: float) -> float:
        """Return the least seconds for training work, in positions times layers of a long prompt chunk (see `TRAINING_WORK`)."""
        return work / PREFILL_GAIN / self.units_per_s

    def lent_s(self, took_s: float, least_s: float) -> float:
        """Return the seconds that a pass takes on the lent device: `took_s` on the real one, at least `least_s` on a slower one."""
        return max(took_s / self.share, least_s)

    @property
    def slows(self) -> bool:
        """Whether the node computes more slowly than its device could, by a share or a speed limit."""
        return self.share < 1 or self.units_per_s < math.inf

    def pass_over(self, units: int, positions: int) -> AbstractContextManager[None]:
        """Return a context that makes one serving pass of `units` layers and `positions` positions take at least its least time."""
        return self.lending(self.least_s(units, positions))

    @contextmanager
    def lending(self, least_s: float) -> Iterator[None]:
        """Make the enclosed work take at least `least_s` seconds, and rest after it for as long as the lent share demands."""
        began_s = self._clock()
        yield
        took_s = self._clock() - began_s
        self._rest(self.lent_s(took_s, least_s) - took_s)

    def _rest(self, seconds: float) -> None:
        """Sleep for `seconds`, less the excess of earlier sleeps that were too long."""
        if seconds <= 0:
            return
        self._owed_s += seconds
        if self._owed_s > 0:
            began_s = self._clock()
            self._sleep(self._owed_s)
            self._owed_s = max(-MOST_OVERSLEPT_S, self._owed_s - (self._clock() - began_s))
