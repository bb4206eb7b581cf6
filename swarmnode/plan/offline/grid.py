"""Grid: the cost of S stages x R pipelines on a network by DT-FM's model (arXiv 2206.01288, section 3), and the clusters of a
network.

A grid puts a device at every (stage, pipeline). The devices of one stage hold the same layers and average their gradients;
the devices of one pipeline hand activations on from stage to stage, and gradients back. Nothing but traffic counts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from swarmnode.errors import UsageError
from swarmnode.plan.cost import transfer_s
from swarmnode.plan.offline.planner_files import Scenario
from swarmnode.plan.spans.flow import Floats

CLUSTERINGS = 8
TINY_S = 1e-9
Cluster = list[int]
Grid = npt.NDArray[np.intp]  # [S, R]: the device at each stage of each pipeline; no device twice
Members = npt.NDArray[np.intp]  # [R]: the devices of one stage


@dataclass(frozen=True)
class MicrobatchTraffic:
    """Bytes of one microbatch's activations between two stages, and of the gradients of one stage."""

    activation_bytes: float
    gradient_bytes: float


@dataclass(frozen=True)
class Cost:
    """Seconds that one training step spends on traffic."""

    data_parallel_s: float  # the slowest stage averages its gradients
    pipeline_s: float  # activations forward and gradients back, each hop as slow as its slowest link

    @property
    def total_s(self) -> float:
        """Seconds of averaging and pipeline traffic together, one after the other."""
        return self.data_parallel_s + self.pipeline_s


@dataclass(frozen=True, eq=False)
class Problem:
    """Task of placing S stages x R pipelines on D >= S R devices. Each link counts with its slower direction."""

    stages: int
    replicas: int
    averaging_s: Floats  # [D, D]: seconds of averaging that one more device in the stage adds to a device
    hop_s: Floats  # [D, D]: seconds of one hop, one way
    kinds: Floats | None = None  # [D]: only devices with the same value may be swapped

    def __repr__(self) -> str:
        return f"Problem({self.stages} stages x {self.replicas} pipelines on {self.devices} devices)"

    @property
    def devices(self) -> int:
        """Number of devices, D; a grid leaves D - S R of them unused."""
        return len(self.hop_s)

    @classmethod
    def on(cls, scenario: Scenario, *, stages: int, replicas: int, traffic: MicrobatchTraffic) -> Problem:
        """Return the problem for this network and traffic. Raises UsageError if the grid is empty or larger than the network."""
        if stages < 1 or replicas < 1:
            raise UsageError(f"{stages} stages x {replicas} pipelines: there must be at least one of each")
        if stages * replicas > scenario.devices:
            raise UsageError(
                f"{stages} stages x {replicas} pipelines need {stages * replicas} devices; "
                f"{scenario.name} has {scenario.devices}"
            )
        everybody = np.arange(scenario.devices)
        return cls(
            stages,
            replicas,
            averaging_s=2 * slower_way_s(scenario, everybody, traffic.gradient_bytes / replicas),
            hop_s=slower_way_s(scenario, everybody, traffic.activation_bytes),
        )

    def cost(self, grid: Grid) -> Cost:
        """Return the seconds of traffic of a step with the devices placed as in `grid`."""
        return Cost(max(map(self.stage_averaging_s, grid)), self.pipeline_s(grid))

    def stage_averaging_s(self, members: Members) -> float:
        """Return the seconds of averaging in one stage: the slowest device's sum over the other `members`."""
        return float(self.averaging_s[members[:, None], members].sum(axis=1).max())

    def pipeline_s(self, grid: Grid) -> float:
        """Return the seconds of all hops, there and back, each as slow as its slowest link."""
        return 2 * float(self.hop_s[grid[:-1], grid[1:]].max(axis=1).sum())


def slower_way_s(scenario: Scenario, members: Members, size_bytes: float) -> Floats:
    """Return the seconds [M, M] of sending `size_bytes` from one member to another, in the slower direction; 0 on the diagonal."""
    part = np.ix_(members, members)
    seconds = transfer_s(size_bytes, scenario.delay_s[part], scenario.bandwidth_bps[part])
    slower: Floats = np.maximum(seconds, seconds.T)
    np.fill_diagonal(slower, 0.0)
    return slower


@dataclass(frozen=True)
class Dendrogram:
    """Single-linkage clustering of D devices.

    In `order` [D] the devices of a cluster are contiguous at every level; `gaps` [D - 1] are the costs at which neighbours in
    that order join.
    """

    order: list[int]
    gaps: Floats

    def clusters(self, most: float) -> list[Cluster]:
        """Return the clusters that links of cost `most` or less connect."""
        cuts = np.flatnonzero(self.gaps > most) + 1
        return [part.tolist() for part in np.split(np.array(self.order), cuts)]

    def levels(self, count: int) -> list[float]:
        """Return costs at which to cut the tree: -1 (all apart), the costs below the `count` largest relative steps, infinity."""
        values = np.unique(self.gaps)
        steps = values[1:] / np.maximum(values[:-1], TINY_S)
        widest = np.sort(np.argsort(-steps, kind="stable")[:count])
        return [-1.0, *values[widest].tolist(), math.inf]


def dendrogram(cost: Floats) -> Dendrogram:
    """Return the single-linkage clustering of the devices by `cost` [D, D], with Prim's algorithm.

    Devices are ordered as the tree grows, so devices that join at one level are contiguous.
    """
    devices = len(cost)
    reach = cost[0].copy()
    outside = np.ones(devices, dtype=bool)
    outside[0] = False
    order, gaps = [0], np.zeros(devices - 1)
    for step in range(devices - 1):
        nearest = int(np.where(outside, reach, np.inf).argmin())
        gaps[step] = reach[nearest]
        outside[nearest] = False
        order.append(nearest)
        reach = np.minimum(reach, cost[nearest])
    return Dendrogram(order, gaps)


def layouts(problem: Problem, random: np.random.Generator, count: int) -> Iterator[Grid]:
    """Yield grids to start a search from: one for each clustering, length of runs and choice of cluster, then `count` random."""
    tree = dendrogram(problem.hop_s)
    clusterings = [tree.clusters(level) for level in tree.levels(CLUSTERINGS)]
    runs = sorted({min(2**power, problem.stages) for power in range(problem.stages.bit_length() + 1)})
    for clusters, longest, spread in itertools.product(clusterings, runs, (False, True)):
        yield _lay(clusters, problem.stages, problem.replicas, longest, spread=spread)
    for _ in range(count):
        clusters = clusterings[random.integers(len(clusterings))]
        shuffled = [clusters[index] for index in random.permutation(len(clusters))]
        longest = int(random.integers(1, problem.stages + 1))
        yield _lay(shuffled, problem.stages, problem.replicas, longest, spread=bool(random.integers(2)))


def _lay(clusters: list[Cluster], stages: int, replicas: int, longest: int, *, spread: bool) -> Grid:
    """Return a grid made of runs of stages. Within a run of at most `longest` stages each pipeline stays in one cluster."""
    left = [list(cluster) for cluster in clusters]
    grid = np.empty((stages, replicas), dtype=np.intp)
    stage = 0
    while stage < stages:
        # the longest run such that each pipeline finds its devices in one cluster; 1 if there is none
        fits = (
            length
            for length in range(min(longest, stages - stage), 1, -1)
            if sum(len(cluster) // length for cluster in left) >= replicas
        )
        length = next(fits, 1)
        for pipeline in range(replicas):
            cluster = _next_cluster(left, length, spread=spread)
            grid[stage : stage + length, pipeline] = [cluster.pop(0) for _ in range(length)]
        stage += length
    return grid


def _next_cluster(left: list[Cluster], length: int, *, spread: bool) -> Cluster:
    """Return the cluster for the next pipeline's run of `length` devices: the fullest one if `spread`, else the first that fits."""
    if spread:
        return max(left, key=len)
    return next(cluster for cluster in left if len(cluster) >= length)
