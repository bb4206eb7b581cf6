"""The cost of every swap at once, against making each of them."""

from __future__ import annotations

import numpy as np
import pytest

from swarmnode.plan.offline.grid import Grid
from swarmnode.plan.offline.grid_search import Arrangement
from tests.plan.networks import random_problem

SHAPES = [(3, 3, 9), (3, 3, 11), (1, 4, 6), (5, 1, 7), (2, 2, 4), (4, 2, 9), (2, 1, 2), (4, 4, 18)]


def exchanged(grid: Grid, a: int, b: int) -> Grid:
    other = grid.copy()
    other[grid == a], other[grid == b] = b, a
    return other


@pytest.mark.parametrize("stages, replicas, devices", SHAPES)
def test_swap_costs_are_those_of_the_grids_after_them(stages: int, replicas: int, devices: int) -> None:
    problem = random_problem(stages, replicas, devices, seed=1)
    random = np.random.default_rng(2)
    arrangement = Arrangement(problem, random.permutation(devices)[: stages * replicas].reshape(stages, replicas))
    for _ in range(4):
        costs = arrangement.swap_costs()
        stage = {int(device): number for number, group in enumerate(arrangement.grid) for device in group}
        for a, b in np.ndindex(devices, devices):
            if stage.get(a) == stage.get(b):
                assert costs[a, b] == np.inf
            else:
                assert costs[a, b] == pytest.approx(problem.cost(exchanged(arrangement.grid, a, b)).total_s)
        a, b = random.permutation(np.argwhere(np.isfinite(costs)))[0]
        arrangement.swap(a, b)
        assert arrangement.cost.total_s <= costs[a, b] + 1e-12, "connecting pipelines anew made it dearer"
        assert len(set(arrangement.grid.ravel().tolist())) == stages * replicas


def test_pipelines_are_connected_by_the_fastest_links() -> None:
    problem = random_problem(2, 3, 6, seed=4)
    problem.hop_s[:] = 1.0
    for a, b in ((0, 5), (1, 3), (2, 4)):
        problem.hop_s[a, b] = problem.hop_s[b, a] = 0.1
    arrangement = Arrangement(problem, np.array([[0, 1, 2], [3, 4, 5]]))
    assert arrangement.grid.tolist() == [[0, 1, 2], [5, 3, 4]]
    assert arrangement.cost.pipeline_s == pytest.approx(0.2)


def test_only_devices_of_one_kind_change_places() -> None:
    problem = random_problem(2, 2, 5, seed=5)
    kinds = np.array([0, 0, 1, 1, 1.0])
    object.__setattr__(problem, "kinds", kinds)
    costs = Arrangement(problem, np.array([[0, 2], [1, 3]])).swap_costs()
    possible = {(int(a), int(b)) for a, b in np.argwhere(np.isfinite(costs)) if a < b}
    assert possible == {(0, 1), (2, 3), (2, 4), (3, 4)}
