"""Grids to begin a search from: clusters of devices laid along or across the pipelines.

A cluster is what is connected by links of at most some cost (single linkage), so a network has as many clusterings as there are
steps in its dendrogram; those before the largest steps are of interest. Laid along, a pipeline stays inside a cluster for several
stages, so that these hops are fast; laid across, a stage lies inside a cluster, so that its averaging is. Between the two lies the
length of the run of stages for which a pipeline stays.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from swarmnode.plan.offline.grid import Grid, Problem
from swarmnode.plan.offline.scenario import FloatArray

CLUSTERINGS = 8
TINY_S = 1e-9
Cluster = list[int]


@dataclass(frozen=True)
class Dendrogram:
    """Single linkage: `order` [D] keeps clusters contiguous at every level, `gaps` [D - 1] is the cost at which neighbours join."""

    order: list[int]
    gaps: FloatArray

    def clusters(self, most: float) -> list[Cluster]:
        """What is connected by links that cost at most that."""
        cuts = np.flatnonzero(self.gaps > most) + 1
        return [part.tolist() for part in np.split(np.array(self.order), cuts)]

    def levels(self, count: int) -> list[float]:
        """Below all costs, the costs below the `count` largest relative steps between one joining and the next, above all."""
        values = np.unique(self.gaps)
        steps = values[1:] / np.maximum(values[:-1], TINY_S)
        widest = np.sort(np.argsort(-steps, kind="stable")[:count])
        return [-1.0, *values[widest].tolist(), math.inf]


def dendrogram(cost: FloatArray) -> Dendrogram:
    """Prim's algorithm: in the order in which the tree grows, what joins next to each other at a level is contiguous."""
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
    """Grids worth beginning from: the clusterings as they are, then `count` more with clusters in random order."""
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
    """Runs of stages, each as long as all pipelines can stay inside a cluster, but at most `longest`."""
    left = [list(cluster) for cluster in clusters]
    grid = np.empty((stages, replicas), dtype=np.intp)
    stage = 0
    while stage < stages:
        length = _run_length(left, replicas, min(longest, stages - stage))
        for pipeline in range(replicas):
            cluster = _next_cluster(left, length, spread=spread)
            grid[stage : stage + length, pipeline] = [cluster.pop(0) for _ in range(length)]
        stage += length
    return grid


def _run_length(left: list[Cluster], replicas: int, longest: int) -> int:
    """The most stages for which all pipelines find as many devices each in some cluster; one is always possible."""
    fits = (length for length in range(longest, 1, -1) if sum(len(cluster) // length for cluster in left) >= replicas)
    return next(fits, 1)


def _next_cluster(left: list[Cluster], length: int, *, spread: bool) -> Cluster:
    """The cluster that gives the next pipeline its run: the fullest one where they are spread, else the first that can."""
    if spread:
        return max(left, key=len)
    return next(cluster for cluster in left if len(cluster) >= length)
