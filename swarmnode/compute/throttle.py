"""A device made slower than it is: because its owner lends a share of it, or to have peers of unequal speed on one machine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

MOST_OVERSLEPT_S = 1.0  # that is caught up with; a machine that was suspended begins anew
PREFILL_GAIN = 16.0  # a long prompt chunk, or a microbatch, uses a device about so much better than a single position
FORWARD_WORK, BACKWARD_WORK = 1.0, 2.0  # of a microbatch, in passes of a prompt chunk
TRAINING_WORK = FORWARD_WORK + BACKWARD_WORK


class Throttle:
    """Lets passes take at least as long as on a device that does `units_per_s` of single positions (infinity changes nothing), and
    lets the device rest after each pass so that it is busy for a `share` of the time (its duty cycle) while there is work.

    Sleeps that were too long are caught up with. All rows of a decode pass count as one, as its cost is that of reading the
    weights. Used from one thread.
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
            raise ValueError(f"a throttle of {units_per_s} units/s")
        if not 0 < share <= 1:
            raise ValueError(f"a share of {share}")
        self.units_per_s = units_per_s
        self.share = share
        self._owed_s = 0.0  # rest; less than none where it slept too long
        self._clock = clock
        self._sleep = sleep

    def __repr__(self) -> str:
        return f"Throttle({self.units_per_s:g} units/s, {self.share:.0%} of the time)"

    def least_s(self, units: int, positions: int) -> float:
        """Seconds that `units` take for so many positions: 1 is a decode pass, more are a prompt chunk."""
        passes = 1.0 if positions == 1 else max(1.0, positions / PREFILL_GAIN)
        return units * passes / self.units_per_s

    def least_of_work_s(self, work: float) -> float:
        """The same of training. `work`: positions times units, in long prompt chunks, and as many times as these cost."""
        return work / PREFILL_GAIN / self.units_per_s

    def lent_s(self, took_s: float, least_s: float) -> float:
        """What takes the real device `took_s`, and `least_s` as a slower one, takes so long as it is lent."""
        return max(took_s / self.share, least_s)

    @property
    def slows(self) -> bool:
        """Whether anything takes longer than on the real device."""
        return self.share < 1 or self.units_per_s < math.inf

    def pass_over(self, units: int, positions: int) -> AbstractContextManager[None]:
        """Around one pass of serving."""
        return self.lending(self.least_s(units, positions))

    @contextmanager
    def lending(self, least_s: float) -> Iterator[None]:
        """Around any work that takes so long at least: what the real device needed is part of the time."""
        began_s = self._clock()
        yield
        took_s = self._clock() - began_s
        self._rest(self.lent_s(took_s, least_s) - took_s)

    def _rest(self, seconds: float) -> None:
        """Sleep, and remember by how much it was too long."""
        if seconds <= 0:
            return
        self._owed_s += seconds
        if self._owed_s > 0:
            began_s = self._clock()
            self._sleep(self._owed_s)
            self._owed_s = max(-MOST_OVERSLEPT_S, self._owed_s - (self._clock() - began_s))
