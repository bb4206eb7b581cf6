"""Measures of a simulation: totals, curves over time, and single values such as latencies."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
PERCENTILES = (50, 90, 99)


class Measures:
    """Measures of one simulation: `totals`, `curves` over time, single `values`, and the CPU time of decisions.

    Curves have one point every `sample_s` seconds. `decision_s` is measured with this machine's clock; it is the only figure that
    differs between two runs with the same settings.
    """

    def __init__(self, sample_s: float) -> None:
        self.sample_s = sample_s
        self.totals: dict[str, float] = defaultdict(float)
        self.values: dict[str, list[float]] = defaultdict(list)
        self.curves: dict[str, list[float]] = defaultdict(list)
        self.times_s: list[float] = []
        self.decision_s: dict[str, list[float]] = defaultdict(list)
        self._since: dict[str, float] = defaultdict(float)

    def count(self, name: str, amount: float) -> None:
        """Add `amount` to the total `name` and to the next point of its curve."""
        self.totals[name] += amount
        self._since[name] += amount

    def record(self, name: str, value: float) -> None:
        """Add one single `value` under `name`."""
        self.values[name].append(value)

    def sample(self, now_s: float, gauges: dict[str, float]) -> None:
        """Add the point at `now_s` to all curves: counts per second since the last sample, and `gauges` unchanged."""
        self.times_s.append(now_s)
        rates = {name: amount / self.sample_s for name, amount in self._since.items()}
        self._since.clear()
        for name, value in {**dict.fromkeys(self.curves, 0.0), **rates, **gauges}.items():
            curve = self.curves[name]
            curve += [0.0] * (len(self.times_s) - 1 - len(curve))
            curve.append(value)

    def timed(self, name: str, decision: Callable[[], T]) -> T:
        """Return the result of `decision` and note under `name` the CPU time that it took on this machine."""
        began_s = time.thread_time()
        result = decision()
        self.decision_s[name].append(time.thread_time() - began_s)
        return result
