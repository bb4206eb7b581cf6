"""Bottleneck matchings against trying all permutations."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from swarmnode.plan.offline.grid_search import bottleneck_matching


@pytest.mark.parametrize("size", range(1, 7))
def test_no_matching_is_better(size: int) -> None:
    random = np.random.default_rng(size)
    for _ in range(30):
        cost = random.integers(0, 10, (size, size)).astype(float)
        columns = bottleneck_matching(cost)
        assert sorted(columns) == list(range(size))
        best = min(cost[range(size), list(order)].max() for order in permutations(range(size)))
        assert cost[range(size), columns].max() == best


def test_a_known_matching_that_cannot_be_beaten_stays() -> None:
    cost = np.ones((4, 4))
    assert bottleneck_matching(cost, [2, 3, 1, 0]) == [2, 3, 1, 0]


def test_a_wide_matching() -> None:
    """More columns than an integer of the machine has bits; the best one was hidden on purpose."""
    random = np.random.default_rng(1)
    hidden = random.permutation(100)
    cost = random.uniform(2, 3, (100, 100))
    cost[np.arange(100), hidden] = 1.0
    assert bottleneck_matching(cost) == hidden.tolist()
