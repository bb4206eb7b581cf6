"""Histograms: figures in buckets, as Prometheus wants them."""

from __future__ import annotations

import pytest

from swarmnode.metrics.metric import Histogram


def test_buckets_are_cumulative_and_end_with_everything() -> None:
    histogram = Histogram((1.0, 2.5))
    for figure in (0.5, 1.0, 2.0, 7.0):
        histogram.observe(figure)
    assert histogram.buckets() == [("1.0", 2.0), ("2.5", 3.0), ("+Inf", 4.0)]
    assert (histogram.count, histogram.sum) == (4, 10.5)


def test_an_empty_one_has_its_buckets_at_zero() -> None:
    assert Histogram((1.0,)).buckets() == [("1.0", 0.0), ("+Inf", 0.0)]


def test_what_fails_is_not_timed() -> None:
    histogram = Histogram()
    with pytest.raises(ValueError), histogram.timing():
        raise ValueError
    with histogram.timing():
        pass
    assert histogram.count == 1 and 0 < histogram.sum < 1
