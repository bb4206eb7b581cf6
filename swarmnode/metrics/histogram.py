"""Histogram: how often a figure fell into which bucket. Plain Python: counting costs less than a microsecond."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)


class Histogram:
    """Fed by one thread. Who reads from another one meanwhile may miss the newest figure, and no more."""

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self.sum = 0.0
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)

    def __repr__(self) -> str:
        return f"<Histogram of {self.count} figures, sum {self.sum:.6g}>"

    @property
    def count(self) -> int:
        """How many figures there were."""
        return sum(self._counts)

    def observe(self, figure: float) -> None:
        """Count a figure in the first bucket whose bound is not below it."""
        self._counts[bisect_left(self._bounds, figure)] += 1
        self.sum += figure

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Around what takes time; what fails is not counted."""
        began_s = time.perf_counter()
        yield
        self.observe(time.perf_counter() - began_s)

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, figures up to it), as Prometheus wants them: cumulative, the last one `+Inf`."""
        cumulative, total = [], 0
        for bound, count in zip([*self._bounds, float("inf")], tuple(self._counts), strict=True):
            total += count
            cumulative.append(("+Inf" if bound == float("inf") else str(bound), float(total)))
        return cumulative
