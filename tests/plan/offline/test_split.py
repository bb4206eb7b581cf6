"""Units cut over stages, against trying all cuts."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest

from swarmnode.plan.offline.hosting import StageRoom, split, units_that_fit
from swarmnode.plan.view import Span


def slowest(work: list[float], unit_bytes: list[int], stages: list[StageRoom], spans: list[Span]) -> float:
    """Seconds of the slowest stage; infinite where one overflows."""
    fits = all(
        sum(unit_bytes[span.start : span.end]) <= room.room_bytes for span, room in zip(spans, stages, strict=True)
    )
    times = (sum(work[span.start : span.end]) / room.work_per_s for span, room in zip(spans, stages, strict=True))
    return max(times) if fits else np.inf


@pytest.mark.parametrize("seed", range(30))
def test_no_cut_is_faster(seed: int) -> None:
    random = np.random.default_rng(seed)
    units = 8
    work = random.integers(1, 9, units).astype(float).tolist()
    unit_bytes = random.integers(1, 6, units).tolist()
    stages = [StageRoom(float(random.integers(1, 5)), float(random.integers(4, 16))) for _ in range(3)]
    cuts = ([0, *inner, units] for inner in combinations(range(1, units), len(stages) - 1))
    spans = [[Span(start, end) for start, end in pairwise(cut)] for cut in cuts]
    best_s = min(slowest(work, unit_bytes, stages, each) for each in spans)
    found = split(work, unit_bytes, stages)
    if found is None:
        assert best_s == np.inf
    else:
        assert slowest(work, unit_bytes, stages, found) == pytest.approx(best_s)
        assert [found[0].start, found[-1].end] == [0, units]
        assert all(one.end == other.start for one, other in pairwise(found))


def test_a_stage_twice_as_fast_holds_twice_as_much() -> None:
    assert split([1.0] * 9, [1] * 9, [StageRoom(2.0, 99), StageRoom(1.0, 99)]) == [Span(0, 6), Span(6, 9)]


def test_memory_overrules_speed() -> None:
    assert split([1.0] * 9, [1] * 9, [StageRoom(2.0, 4), StageRoom(1.0, 5)]) == [Span(0, 4), Span(4, 9)]


def test_more_stages_than_units() -> None:
    assert split([1.0, 1.0], [1, 1], [StageRoom(1.0, 9)] * 3) is None


def test_units_that_fit() -> None:
    assert units_that_fit([3, 3, 3, 3], [7, 4]) == 3
    assert units_that_fit([3, 3], [7]) == 2
    assert units_that_fit([3], [2, 2]) == 0
