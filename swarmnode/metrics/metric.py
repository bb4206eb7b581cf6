"""Metric: name and kind of a figure. Reading: its value at one moment."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Union

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)


class Histogram:
    """Counts of figures by buckets, fed by one thread. A reader on another thread may miss the newest figure, and no more."""

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self.sum = 0.0
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)

    @property
    def count(self) -> int:
        """Number of figures observed."""
        return sum(self._counts)

    def observe(self, figure: float) -> None:
        """Count a figure in the first bucket whose bound is not below it."""
        self._counts[bisect_left(self._bounds, figure)] += 1
        self.sum += figure

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Observe the seconds that the `with` block takes, unless it raises."""
        began_s = time.perf_counter()
        yield
        self.observe(time.perf_counter() - began_s)

    def buckets(self) -> list[tuple[str, float]]:
        """Return (upper bound, number of figures up to it) of each bucket in Prometheus' form: cumulative, the last bound
        "+Inf"."""
        cumulative, total = [], 0
        for bound, count in zip([*self._bounds, float("inf")], tuple(self._counts), strict=True):
            total += count
            cumulative.append(("+Inf" if bound == float("inf") else str(bound), float(total)))
        return cumulative


class MetricKind(Enum):
    """Kind of a metric in Prometheus' exposition format."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Metric:
    """Name of a metric by Prometheus' conventions (base units, counters end in `_total`), its kind, its help text and the names of
    its labels.

    A label's values come from a small known set (codecs, phases, states), or exist one at a time (the span that the node holds).
    Never peers or sessions: strangers decide how many there are. The swarm's name is added to all.
    """

    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()


class Reading(NamedTuple):
    """Value of a metric at one moment; `labels` are the labels' values, in the order of their names."""

    metric: Metric
    value: Union[float, Histogram]
    labels: tuple[str, ...] = ()


Readings = Iterable[Reading]
Source = Callable[[], Readings]
"""Function that reads the current figures of one part of the process."""


class Figures:
    """All readings of one moment, for a view that shows some of them."""

    def __init__(self, readings: Readings) -> None:
        self._readings: defaultdict[Metric, list[Reading]] = defaultdict(list)
        for reading in readings:
            self._readings[reading.metric].append(reading)

    def values(self, metric: Metric, **labels: str) -> list[Union[float, Histogram]]:
        """Return the metric's values with these values of its labels, one for each reading."""
        wanted = {(metric.labels.index(name), value) for name, value in labels.items()}
        return [each.value for each in self._readings.get(metric, ()) if wanted <= {*enumerate(each.labels)}]

    def sum(self, metric: Metric, **labels: str) -> float:
        """Return the sum of `values`; of a histogram counts the sum of all that it observed. 0 without a reading."""
        return sum(each.sum if isinstance(each, Histogram) else each for each in self.values(metric, **labels))

    def by(self, metric: Metric, label: str) -> Counter[str]:
        """Return the sums of a counter, rounded down, by the values of `label`."""
        seen = (each.labels[metric.labels.index(label)] for each in self._readings.get(metric, ()))
        return Counter({value: int(self.sum(metric, **{label: value})) for value in seen})
