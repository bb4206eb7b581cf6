"""What is measured: totals, curves over time, and the spread of latencies."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
PERCENTILES = (50, 90, 99)


class Measures:
    """`count` adds to a total and to the curve of its name; `note` keeps single values; `gauge` sets a point of a curve.

    Curves have one point every `sample_s`. `timed` is about this machine's clock, and the only figure that is not the same
    each time.
    """

    def __init__(self, sample_s: float) -> None:
        self.sample_s = sample_s
        self.totals: dict[str, float] = defaultdict(float)
        self.values: dict[str, list[float]] = defaultdict(list)
        self.curves: dict[str, list[float]] = defaultdict(list)
        self.times_s: list[float] = []
        self.decision_s: dict[str, list[float]] = defaultdict(list)
        self._since: dict[str, float] = defaultdict(float)

    def __repr__(self) -> str:
        return f"<Measures of {len(self.totals)} totals over {len(self.times_s)} samples>"

    def count(self, name: str, amount: float) -> None:
        """Add to a total."""
        self.totals[name] += amount
        self._since[name] += amount

    def note(self, name: str, value: float) -> None:
        """One value of many."""
        self.values[name].append(value)

    def sample(self, now_s: float, gauges: dict[str, float]) -> None:
        """Close the points of all curves: counts per second since the last sample, and gauges as they are."""
        self.times_s.append(now_s)
        rates = {name: amount / self.sample_s for name, amount in self._since.items()}
        self._since.clear()
        for name, value in {**dict.fromkeys(self.curves, 0.0), **rates, **gauges}.items():
            curve = self.curves[name]
            curve += [0.0] * (len(self.times_s) - 1 - len(curve))
            curve.append(value)

    def timed(self, name: str, decision: Callable[[], T]) -> T:
        """The decision, and how long a core of this machine worked on it."""
        began_s = time.thread_time()
        result = decision()
        self.decision_s[name].append(time.thread_time() - began_s)
        return result


def percentile(values: Sequence[float], percent: float) -> float:
    """By linear interpolation between the nearest ranks; NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
