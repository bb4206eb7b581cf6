"""DT-FM's cost model against its sums written out; and a few grids whose cost can be worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from swarmnode.errors import UsageError
from swarmnode.plan.offline.grid import MicrobatchTraffic, Problem
from swarmnode.plan.offline.planner_files import Scenario
from tests.plan.networks import GPT3_XL, instances, network, noisy_regions


def cost_written_out(scenario: Scenario, grid: list[list[int]], traffic: MicrobatchTraffic) -> tuple[float, float]:
    """The sums of arXiv 2206.01288, section 3, one term after the other; sizes in Gbit, bandwidths in Gbit/s."""
    replicas = len(grid[0])
    activation, gradient = 8 * traffic.activation_bytes / 1e9, 8 * traffic.gradient_bytes / 1e9
    averaging = 0.0
    for stage in grid:
        for i in stage:
            paid = 0.0
            for j in stage:
                if j != i:
                    paid += 2 * (scenario.delay_s[i][j] + gradient / (replicas * scenario.bandwidth_bps[i][j] / 1e9))
            averaging = max(averaging, paid)
    pipeline = 0.0
    for stage in range(len(grid) - 1):
        hops = []
        for here, there in zip(grid[stage], grid[stage + 1], strict=True):
            hops.append(scenario.delay_s[here][there] + activation / (scenario.bandwidth_bps[here][there] / 1e9))
        pipeline += 2 * max(hops)
    return averaging, pipeline


@pytest.mark.parametrize("stages, replicas, devices", [(4, 3, 12), (3, 4, 15), (1, 5, 5), (6, 1, 6), (1, 1, 1)])
def test_costs_are_the_sums_of_the_paper(stages: int, replicas: int, devices: int) -> None:
    scenario = noisy_regions(devices, regions=3, seed=devices)
    problem = Problem.on(scenario, stages=stages, replicas=replicas, traffic=GPT3_XL)
    random = np.random.default_rng(0)
    for _ in range(20):
        grid = random.permutation(devices)[: stages * replicas].reshape(stages, replicas)
        cost = problem.cost(grid)
        expected = cost_written_out(scenario, grid.tolist(), GPT3_XL)
        assert (cost.data_parallel_s, cost.pipeline_s) == pytest.approx(expected)
        assert cost.total_s == cost.data_parallel_s + cost.pipeline_s


def test_a_pipeline_inside_each_machine() -> None:
    """Published for this network: 2.912 s + 0.528 s."""
    problem = Problem.on(instances([8] * 8, 100, 3.125), stages=8, replicas=8, traffic=GPT3_XL)
    cost = problem.cost(np.arange(64).reshape(8, 8).T)
    assert cost.data_parallel_s == pytest.approx(2.912)
    assert cost.pipeline_s == pytest.approx(14 * 8 * 0.471249 / 100)


def test_the_slower_direction_counts() -> None:
    delay_s = np.array([[0, 0.001], [0.005, 0]])
    bandwidth_bps = np.array([[0, 1e9], [4e9, 0]])
    traffic = MicrobatchTraffic(activation_bytes=1e9 / 8, gradient_bytes=2e9 / 8)
    hop = Problem.on(network(delay_s, bandwidth_bps), stages=2, replicas=1, traffic=traffic)
    assert hop.cost(np.array([[0], [1]])).total_s == pytest.approx(2 * (0.001 + 1))
    assert hop.cost(np.array([[1], [0]])).total_s == pytest.approx(2 * (0.001 + 1))
    mates = Problem.on(network(delay_s, bandwidth_bps), stages=1, replicas=2, traffic=traffic)
    assert mates.cost(np.array([[0, 1]])).total_s == pytest.approx(2 * (0.001 + 1))


def test_what_cannot_be_laid() -> None:
    scenario = instances([2, 2], 100, 1)
    with pytest.raises(UsageError, match="3 stages x 2 pipelines need 6 devices; made up has 4"):
        Problem.on(scenario, stages=3, replicas=2, traffic=GPT3_XL)
    with pytest.raises(UsageError, match="at least one of each"):
        Problem.on(scenario, stages=0, replicas=2, traffic=GPT3_XL)
