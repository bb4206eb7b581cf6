"""The table of all metrics keeps Prometheus' conventions."""

from __future__ import annotations

import pytest

from swarmnode.metrics import table
from swarmnode.metrics.metric import Metric, MetricKind

UNBOUNDED = {"peer", "session", "address", "name"}


def test_names_are_unique() -> None:
    names = [metric.name for metric in table.ALL]
    assert len(set(names)) == len(names) > 40


@pytest.mark.parametrize("metric", table.ALL, ids=lambda metric: metric.name)
def test_conventions(metric: Metric) -> None:
    assert metric.name.startswith("swarmnode_") and metric.help.endswith(".")
    assert metric.name.endswith("_total") is (metric.kind is MetricKind.COUNTER)
    words = set(metric.name.split("_"))
    assert not words & {"ms", "millis", "kb", "mb", "percent"}, "base units: seconds, bytes, ratios"
    assert not UNBOUNDED & set(metric.labels), "a label whose values strangers decide"
