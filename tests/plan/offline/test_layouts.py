"""Clusters by bandwidth, and grids laid along or across them."""

from __future__ import annotations

import numpy as np
import pytest

from swarmnode.plan.offline.grid import Problem, dendrogram, layouts
from tests.plan.networks import GPT3_XL, instances, noisy_regions


def test_clusters_at_every_level() -> None:
    """Points on a line: 0 1 . 3 . . . . . 9 10, shuffled."""
    places = np.array([9.0, 0.0, 3.0, 10.0, 1.0])
    tree = dendrogram(np.abs(places[:, None] - places))
    for most, expected in [(0.5, 5), (1.0, 3), (2.0, 2), (6.0, 1)]:
        clusters = tree.clusters(most)
        assert len(clusters) == expected
        for cluster in clusters:
            at = np.sort(places[cluster])
            assert (np.diff(at) <= most).all()
    assert tree.levels(1) == [-1.0, 2.0, np.inf]  # the widest step is that from 2 to 6


@pytest.mark.parametrize("stages, replicas", [(4, 5), (3, 7), (20, 1), (1, 20), (2, 3)])
def test_every_layout_is_a_grid(stages: int, replicas: int) -> None:
    problem = Problem.on(noisy_regions(21, 4, seed=1), stages=stages, replicas=replicas, traffic=GPT3_XL)
    laid = list(layouts(problem, np.random.default_rng(0), 50))
    assert len(laid) >= 50
    for grid in laid:
        assert grid.shape == (stages, replicas)
        assert len(np.unique(grid)) == grid.size and grid.min() >= 0 and grid.max() < 21


def test_one_device() -> None:
    problem = Problem.on(instances([1], 1, 1), stages=1, replicas=1, traffic=GPT3_XL)
    assert all(grid.tolist() == [[0]] for grid in layouts(problem, np.random.default_rng(0), 3))


def test_machines_that_are_too_small_for_a_pipeline_carry_its_first_stages() -> None:
    """Machines of two and as many single devices: pipelines stay inside machines for two stages, then go on outside."""
    scenario = instances([2, 2, 2, 1, 1, 1, 1, 1, 1], 100, 1)
    problem = Problem.on(scenario, stages=4, replicas=3, traffic=GPT3_XL)
    slow_hops = {
        int((problem.hop_s[grid[:-1], grid[1:]].max(axis=1) > 1.0).sum())
        for grid in layouts(problem, np.random.default_rng(0), 0)
    }
    assert min(slow_hops) == 2
