"""Shortest paths through all stages, against trying all orders."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from swarmnode.plan.offline.grid_search import EXACT, path_length, shortest_path
from swarmnode.plan.spans.flow import Floats


def lengths(count: int, seed: int) -> Floats:
    values = np.triu(np.random.default_rng(seed).random((count, count)), 1)
    return values + values.T


@pytest.mark.parametrize("count", range(1, 8))
def test_short_paths_are_exact(count: int) -> None:
    length = lengths(count, seed=count)
    order = shortest_path(length)
    assert sorted(order) == list(range(count))
    shortest = min(path_length(length, list(path)) for path in permutations(range(count)))
    assert path_length(length, order) == pytest.approx(shortest)


def test_long_paths_find_a_line() -> None:
    """Points on a line, shuffled: the shortest path walks along it."""
    places = np.random.default_rng(5).permutation(3 * EXACT).astype(float)
    order = shortest_path(np.abs(places[:, None] - places))
    walked = places[order]
    assert sorted(walked) in (walked.tolist(), walked[::-1].tolist())


def test_never_longer_than_the_start() -> None:
    length = lengths(2 * EXACT, seed=3)
    start = shortest_path(length)
    assert path_length(length, shortest_path(length, start)) <= path_length(length, start)
    assert path_length(length, start) < 0.5 * path_length(length, list(range(2 * EXACT)))
