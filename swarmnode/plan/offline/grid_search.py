"""Laying S stages x R pipelines on a network so that a step's traffic takes least: layouts of clusters, then swaps of devices.

The most promising layouts are improved by drawing swap after swap, each with a probability proportional to
exp(-cost / temperature) among all swaps (annealing without rejection: Bortz, Kalos and Lebowitz 1975), while the temperature falls;
the better half goes into the next round, with twice the steps for each. Pipelines are connected anew after each swap by the
bottleneck matching, and the order of stages is the shortest path through them.

Work is counted, not timed: the same problem, seed and effort give the same grid. A clock, where one is given, can only end it
early.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np

from swarmnode.plan.offline.grid import Grid, Problem
from swarmnode.plan.offline.layouts import layouts
from swarmnode.plan.offline.scenario import FloatArray
from swarmnode.plan.offline.stage_order import shortest_path
from swarmnode.plan.offline.swaps import Arrangement, connected

SURVIVORS = (8, 4, 2, 1)  # per round
MOST_IDLE = (
    2  # rounds that gain nothing before the search ends: where links are equal, layouts often are the best already
)
HOT, COLD = 0.015, 0.0005  # first and last temperature of a round, relative to the cost
DRAWN_WITHIN = 12.0  # temperatures above the cheapest swap: e^-12 of its probability, never drawn
ORDERED_EVERY = 100  # swaps
# Work is measured in elements of matrices that numpy goes through; a step has a part that does not depend on their sizes.
STEP_WORK = 20_000
ORDER_WORK = 300  # per pair of stages
DEFAULT_WORK = 6e8
MAX_LAYOUTS = 1000
LAYOUT_SHARE = 0.1  # of the work
ENOUGH_STEPS = 350  # per device: more gain nothing on small networks
FEWEST_STEPS = 10  # in a round: below which annealing cannot achieve anything


class Search:
    """One search. `expired` is asked often, and ends it; `progress(done, cost_s)` is told the share done and the best cost."""

    def __init__(
        self,
        problem: Problem,
        *,
        seed: int = 0,
        effort: float = 1.0,
        expired: Callable[[], bool] = lambda: False,
        progress: Callable[[float, float], None] = lambda done, cost_s: None,
    ) -> None:
        self.problem = problem
        self._random = np.random.default_rng(seed)
        self._work = effort * DEFAULT_WORK
        self._steps = int(min(self._work / _step_work(problem), effort * ENOUGH_STEPS * problem.devices))
        self._expired = expired
        self._progress = progress
        self._steps_done = 0
        self._best_s = math.inf

    def __repr__(self) -> str:
        return f"Search({self.problem!r}, {self._steps_done} steps, best {self._best_s:.3f} s)"

    def run(self, start: Grid | None = None) -> Grid:
        """The best grid that the work allows, beginning from `start` or from layouts of clusters."""
        grids = self._starts() if start is None else self._ranked([_reordered(Arrangement(self.problem, start)).grid])
        idle = 0  # rounds that gained nothing
        for survivors in SURVIVORS:
            grids, before_s = grids[:survivors], self._best_s
            steps = self._steps // len(SURVIVORS) // len(grids)
            if steps >= FEWEST_STEPS and idle < MOST_IDLE and not self._expired():
                grids = self._ranked([*grids, *(self._anneal(grid, steps) for grid in grids)])
                idle = idle + 1 if self._best_s == before_s else 0
        self._progress(1.0, self._best_s)
        return grids[0]

    def _starts(self) -> list[Grid]:
        """The most promising layouts."""
        problem = self.problem
        count = min(MAX_LAYOUTS, int(self._work * LAYOUT_SHARE / _order_work(problem)))
        promises: dict[bytes, tuple[float, Grid]] = {}
        for grid in layouts(problem, self._random, count):
            if grid.tobytes() not in promises:
                promises[grid.tobytes()] = _promise(problem, grid)
            if self._expired():
                break
        best = sorted(promises.values(), key=lambda promise: promise[0])[: SURVIVORS[0]]
        hops = range(problem.stages - 1)
        return self._ranked(connected(problem, grid, hops) for _, grid in best)

    def _ranked(self, grids: Iterable[Grid]) -> list[Grid]:
        """The cheapest first, without repetition."""
        different = {grid.tobytes(): grid for grid in grids}
        ranked = sorted(different.values(), key=lambda grid: self.problem.cost(grid).total_s)
        self._best_s = self.problem.cost(ranked[0]).total_s
        return ranked

    def _anneal(self, start: Grid, steps: int) -> Grid:
        """The best grid on a random walk of so many swaps that cools down."""
        problem = self.problem
        if self._expired():
            return start
        arrangement = Arrangement(problem, start)
        best, best_s = arrangement.grid.copy(), arrangement.cost.total_s
        for step in range(steps):
            if self._expired():
                break
            temperature_s = best_s * HOT * (COLD / HOT) ** (step / steps)
            pair = _draw(arrangement.swap_costs(), temperature_s, self._random)
            if pair is None:
                break
            arrangement.swap(*pair)
            self._steps_done += 1
            if step % ORDERED_EVERY == ORDERED_EVERY - 1:
                arrangement = _reordered(arrangement)
                self._best_s = min(self._best_s, best_s)
                self._progress(self._steps_done / self._steps, self._best_s)
            cost_s = arrangement.cost.total_s
            if cost_s < best_s:
                best, best_s = arrangement.grid.copy(), cost_s
        return best if self._expired() else _reordered(Arrangement(problem, best)).grid


def _step_work(problem: Problem) -> float:
    devices, replicas = problem.devices, problem.replicas
    return STEP_WORK + devices**2 + 2 * replicas**2 * devices + _order_work(problem) / ORDERED_EVERY


def _order_work(problem: Problem) -> float:
    return float(problem.devices**2 + ORDER_WORK * problem.stages**2)


def _draw(costs_s: FloatArray, temperature_s: float, random: np.random.Generator) -> tuple[int, int] | None:
    """A pair of devices with probability proportional to exp(-cost / temperature); None where there is nothing to swap."""
    flat = costs_s.ravel()
    least_s = float(flat.min())
    if not np.isfinite(least_s):
        return None
    near = np.flatnonzero(flat <= least_s + DRAWN_WITHIN * temperature_s)
    drawn = near[((least_s - flat[near]) / max(temperature_s, 1e-300) + random.gumbel(size=len(near))).argmax()]
    a, b = divmod(int(drawn), len(costs_s))
    return a, b


def _reordered(arrangement: Arrangement) -> Arrangement:
    """With stages in the order that their hops' bounds suggest, where that is cheaper."""
    problem = arrangement.problem
    order = shortest_path(_hop_bounds(problem, arrangement.grid))
    other = Arrangement(problem, arrangement.grid[order])
    return other if other.cost.total_s < arrangement.cost.total_s else arrangement


def _promise(problem: Problem, grid: Grid) -> tuple[float, Grid]:
    """A lower bound of what these stages cost in their best order, and the grid in it."""
    bounds_s = _hop_bounds(problem, grid)
    order = shortest_path(bounds_s)
    averaging_s = problem.averaging_s[grid[:, :, None], grid[:, None, :]].sum(axis=2).max()
    return float(averaging_s + 2 * bounds_s[order[:-1], order[1:]].sum()), grid[order]


def _hop_bounds(problem: Problem, grid: Grid) -> FloatArray:
    """[S, S]: what the slowest link of a hop between two stages is at least, since each device has some partner."""
    links_s = problem.hop_s[grid[:, None, :, None], grid[None, :, None, :]]
    one_way = links_s.min(axis=3).max(axis=2)
    bounds_s: FloatArray = np.maximum(one_way, one_way.T)
    return bounds_s
