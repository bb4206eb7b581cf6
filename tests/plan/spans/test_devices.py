"""How a span lies on the devices of a node."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.plan.spans.devices import DevicePart, DeviceView, lay_out, throughput
from swarmnode.plan.view import Span
from tests.work import lines_run


def device(units: int, units_per_s: float = 1.0) -> DeviceView:
    return DeviceView(lambda _start: units, units_per_s)


def spans(layout):
    return [[(part.device, *part.span) for part in replica] for replica in layout]


def test_what_fits_on_no_device_alone_lies_over_them():
    assert spans(lay_out(Span(2, 12), [device(6), device(6)])) == [[(0, 2, 7), (1, 7, 12)]]
    assert spans(lay_out(Span(0, 10), [device(3), device(9)])) == [[(0, 0, 3), (1, 3, 10)]]


def test_what_fits_on_each_device_is_there_once_on_each():
    assert spans(lay_out(Span(0, 5), [device(5), device(7)])) == [[(0, 0, 5)], [(1, 0, 5)]]


def test_four_devices_of_half_the_span_each_hold_it_twice():
    layout = lay_out(Span(0, 8), [device(4)] * 4)
    assert spans(layout) == [[(0, 0, 4), (1, 4, 8)], [(2, 0, 4), (3, 4, 8)]]


def test_the_faster_device_has_more_units():
    assert spans(lay_out(Span(0, 12), [device(11, 3.0), device(11, 1.0)])) == [[(0, 0, 9), (1, 9, 12)]]


def test_a_slow_device_is_no_burden():
    """Over both they would do less than the fast one alone."""
    layout = lay_out(Span(0, 3), [device(9, 100.0), device(9, 1.0)])
    assert throughput(layout, [device(9, 100.0), device(9, 1.0)]) >= 100 / 3


@pytest.mark.parametrize("devices", [[], [device(0)], [device(4), device(5)]])
def test_what_fits_nowhere(devices):
    assert lay_out(Span(0, 10), devices) == ()


def test_a_large_model_is_laid_out_quickly():
    assert lines_run(lambda: lay_out(Span(0, 400), [device(50)] * 8)) < 50_000


@given(
    st.integers(1, 7),
    st.lists(st.tuples(st.integers(0, 7), st.sampled_from([1.0, 2.0, 3.5])), min_size=1, max_size=3),
)
def test_no_way_over_all_devices_is_faster(units, known):
    """Against all ways to cut the span over the devices in their order, or to hold it once on some of them."""
    devices = [device(most, speed) for most, speed in known]
    layout = lay_out(Span(0, units), devices)
    ways = []
    for cuts in itertools.combinations_with_replacement(range(units + 1), len(devices) - 1):
        bounds = [0, *cuts, units]
        parts = tuple(DevicePart(n, Span(a, b)) for n, (a, b) in enumerate(itertools.pairwise(bounds)) if b > a)
        if all(part.span.units <= known[part.device][0] for part in parts):
            ways.append((parts,))
    ways.append(tuple((DevicePart(n, Span(0, units)),) for n, (most, _) in enumerate(known) if most >= units))
    assert throughput(layout, devices) >= max(throughput(way, devices) for way in ways) * (1 - 1e-9)
    for replica in layout:
        assert [part.span.start for part in replica] == [0, *(part.span.end for part in replica[:-1])]
        assert replica[-1].span.end == units
        assert all(part.span.units <= known[part.device][0] for part in replica)
    held = [part.device for replica in layout for part in replica]
    assert len(held) == len(set(held))
