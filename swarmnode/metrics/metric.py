"""Metric and reading: the name and kind of a figure, and the figure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Union

from swarmnode.metrics.histogram import Histogram


class MetricKind(Enum):
    """The kinds of Prometheus' exposition format."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Metric:
    """A name by Prometheus' conventions (base units, counters end in `_total`), and the names of its labels.

    A label's values come from a small set that is known before (codecs, phases, states), or there is one at a time (the
    span that the node holds): never peers or sessions, whose number strangers decide. The swarm's name is added to all.
    """

    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()


class Reading(NamedTuple):
    """What a metric is now; `labels` are the values, in the order of their names."""

    metric: Metric
    value: Union[float, Histogram]
    labels: tuple[str, ...] = ()


Readings = Iterable[Reading]
Source = Callable[[], Readings]
"""Reads the figures of one part of the process, at the moment of the call."""
