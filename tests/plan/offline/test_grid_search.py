"""The search against what is known to be best, against trying everything, and against plain annealing."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import permutations
from typing import Any

import numpy as np
import pytest

from swarmnode.plan.offline import grid_search
from swarmnode.plan.offline.grid import Grid, MicrobatchTraffic, Problem
from swarmnode.plan.offline.grid_search import SURVIVORS, Arrangement, Search
from tests.plan.networks import GPT3_XL, instances, noisy_regions, random_problem


@pytest.mark.parametrize(
    "sizes, inside_gbps, between_gbps, best_s",
    [
        ([8] * 8, 100, 3.125, 3.43980),  # arXiv 2206.01288, "datacenter"
        ([4] * 8 + [1] * 32, 100, 1.25, 31.63415),  # "spot instances": proven in docs/decisions/planning.md
    ],
)
def test_reaches_the_optimum_of_the_published_networks(
    sizes: list[int], inside_gbps: float, between_gbps: float, best_s: float
) -> None:
    shuffled = np.random.default_rng(0).permutation(64)
    scenario = instances(sizes, inside_gbps, between_gbps)
    problem = Problem.on(scenario, stages=8, replicas=8, traffic=GPT3_XL)
    mixed = Problem(8, 8, problem.averaging_s[shuffled][:, shuffled], problem.hop_s[shuffled][:, shuffled])
    assert mixed.cost(Search(mixed, effort=0.05).run()).total_s == pytest.approx(best_s, abs=1e-4)


@pytest.mark.parametrize("seed", range(6))
def test_small_problems_are_solved(seed: int) -> None:
    problem = random_problem(stages=3, replicas=2, devices=7, seed=seed)
    grids = (np.array(order).reshape(3, 2) for order in permutations(range(7), 6))
    best_s = min(problem.cost(grid).total_s for grid in grids)
    assert problem.cost(Search(problem, effort=0.5).run()).total_s == pytest.approx(best_s)


@pytest.mark.parametrize(
    "stages, replicas, devices", [(1, 1, 1), (1, 1, 4), (1, 6, 9), (9, 1, 12), (2, 1, 2), (14, 2, 30)]
)
def test_narrow_grids(stages: int, replicas: int, devices: int) -> None:
    problem = Problem.on(noisy_regions(devices, 3, seed=7), stages=stages, replicas=replicas, traffic=GPT3_XL)
    grid = Search(problem, effort=0.02).run()
    assert grid.shape == (stages, replicas)
    assert len(np.unique(grid)) == grid.size
    random = np.random.default_rng(0)
    drawn = [random.permutation(devices)[: grid.size].reshape(grid.shape) for _ in range(50)]
    assert problem.cost(grid).total_s <= min(problem.cost(other).total_s for other in drawn)


def test_the_slowest_device_is_left_out_where_there_is_one_to_spare() -> None:
    scenario = instances([4, 4, 1], 10, 10)
    scenario.bandwidth_bps[8, :] = scenario.bandwidth_bps[:, 8] = 1e6
    problem = Problem.on(scenario, stages=2, replicas=4, traffic=GPT3_XL)
    assert 8 not in Search(problem, effort=0.02).run()


def test_nothing_to_send_costs_the_delays() -> None:
    problem = Problem.on(instances([3, 3], 1, 1, between_ms=10), stages=3, replicas=2, traffic=MicrobatchTraffic(0, 0))
    assert problem.cost(Search(problem, effort=0.02).run()).total_s == pytest.approx(0.02)


def test_same_seed_same_grid() -> None:
    problem = Problem.on(noisy_regions(24, 4, seed=2), stages=4, replicas=6, traffic=GPT3_XL)
    first, again, other = (Search(problem, seed=seed, effort=0.03).run() for seed in (3, 3, 4))
    assert first.tolist() == again.tolist()
    assert first.tolist() != other.tolist()


def test_more_work_is_not_worse() -> None:
    problem = Problem.on(noisy_regions(32, 5, seed=3), stages=4, replicas=8, traffic=GPT3_XL)
    costs_s = [problem.cost(Search(problem, effort=effort).run()).total_s for effort in (0.001, 0.2)]
    assert costs_s[1] < 0.95 * costs_s[0]


def test_an_expired_clock_ends_the_search_with_a_grid() -> None:
    problem = Problem.on(noisy_regions(64, 6, seed=4), stages=8, replicas=8, traffic=GPT3_XL)
    asked = 0

    def expired() -> bool:
        nonlocal asked
        asked += 1
        return asked > 20

    search = Search(problem, effort=1000.0, expired=expired)
    assert len(np.unique(search.run())) == 64
    assert asked <= 20 + len(SURVIVORS) + sum(SURVIVORS), "no round begins any more"


def test_the_clock_is_looked_at_after_each_piece_of_work(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = most = 0

    def counted(work: Callable[..., Any]) -> Callable[..., Any]:
        def piece(*arguments: Any) -> Any:
            nonlocal pieces
            pieces += 1
            return work(*arguments)

        return piece

    def expired() -> bool:
        nonlocal pieces, most
        most, pieces = max(most, pieces), 0
        return False

    monkeypatch.setattr(grid_search, "_promise", counted(grid_search._promise))
    monkeypatch.setattr(Arrangement, "swap_costs", counted(Arrangement.swap_costs))
    problem = Problem.on(noisy_regions(24, 4, seed=2), stages=4, replicas=6, traffic=GPT3_XL)
    Search(problem, effort=0.02, expired=expired).run()
    assert most == 1


def test_progress_ends_at_one_and_costs_only_fall() -> None:
    told: list[tuple[float, float]] = []
    problem = Problem.on(noisy_regions(20, 3, seed=5), stages=4, replicas=5, traffic=GPT3_XL)
    grid = Search(problem, effort=0.1, progress=lambda done, cost_s: told.append((done, cost_s))).run()
    shares, costs_s = zip(*told, strict=True)
    assert list(shares) == sorted(shares) and shares[-1] == 1.0
    assert list(costs_s) == sorted(costs_s, reverse=True)
    assert costs_s[-1] == problem.cost(grid).total_s


def test_better_than_plain_annealing() -> None:
    """Swaps of two places at random, accepted by Metropolis' rule: as many as take three times the search's processor time."""
    problem = Problem.on(noisy_regions(24, 4, seed=0), stages=4, replicas=6, traffic=GPT3_XL)
    found_s = problem.cost(Search(problem, effort=0.15).run()).total_s
    assert found_s < 1.01 * annealed(problem, seed=0, swaps=60_000)


def annealed(problem: Problem, *, seed: int, swaps: int) -> float:
    """The best cost that plain annealing meets."""
    random = np.random.default_rng(seed)
    grid: Grid = random.permutation(problem.devices).reshape(problem.stages, problem.replicas)
    current_s = best_s = problem.cost(grid).total_s
    for number in range(swaps):
        temperature_s = best_s * 0.05 * (0.0005 / 0.05) ** (number / swaps)
        a, b = random.integers(0, grid.size, 2)
        other = grid.copy()
        other.flat[a], other.flat[b] = grid.flat[b], grid.flat[a]
        cost_s = problem.cost(other).total_s
        if cost_s <= current_s or random.random() < math.exp((current_s - cost_s) / temperature_s):
            grid, current_s = other, cost_s
            best_s = min(best_s, cost_s)
    return best_s
