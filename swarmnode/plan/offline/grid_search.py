"""Grid search: the placement of S stages x R pipelines on a network such that the traffic of a step takes least time.

The search begins with layouts of clusters and improves the most promising ones by swaps of devices. Swap after swap is drawn with
a probability proportional to exp(-cost / temperature) among all swaps (annealing without rejection: Bortz, Kalos and Lebowitz
1975), while the temperature falls. The better half goes into the next round, with twice the steps for each. After each swap the
bottleneck matching connects the pipelines anew; the order of stages is the shortest path through them.

Work is counted, not timed: the same problem, seed and effort give the same grid. `expired` can only end the search early.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np
import numpy.typing as npt

from swarmnode.plan.offline.grid import Grid, Problem, layouts
from swarmnode.plan.offline.scenario import FloatArray
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
EXACT = 10  # 2^10 x 10 partial paths; each further group would double that
MOVED = 3  # the longest part that is moved elsewhere
MOST_WORK = 2e7  # elements of the matrices that are searched for changes
Path = npt.NDArray[np.intp]


def shortest_path(length: FloatArray, start: Sequence[int] | None = None) -> list[int]:
    """Return an order of S groups with a short path through all of them; never longer than `start` (by default 0, 1, …).

    `length` [S, S] is symmetric. Up to `EXACT` groups the path is the shortest.
    """
    count = len(length)
    start = list(range(count) if start is None else start)
    best = _held_karp(length) if count <= EXACT else _improved(length, start)
    return best if path_length(length, best) < path_length(length, start) else start


def path_length(length: FloatArray, order: Sequence[int]) -> float:
    """Return the sum of the lengths between consecutive groups of `order`."""
    return float(length[order[:-1], order[1:]].sum())


def _held_karp(length: FloatArray) -> list[int]:
    """Return the shortest path through all groups (Held and Karp): shortest[subset, last] is the shortest that ends at `last`."""
    count = len(length)
    shortest = np.full((1 << count, count), np.inf)
    before = np.zeros((1 << count, count), dtype=np.intp)
    for group in range(count):
        shortest[1 << group, group] = 0.0
    for subsets in _by_size(count)[1:]:
        for last in range(count):
            ending = subsets[(subsets >> last) & 1 == 1]
            reached = shortest[ending ^ (1 << last)] + length[:, last]
            before[ending, last] = reached.argmin(axis=1)
            shortest[ending, last] = reached.min(axis=1)
    subset = (1 << count) - 1
    order = [int(shortest[subset].argmin())]
    while len(order) < count:
        last = order[-1]
        order.append(int(before[subset, last]))
        subset ^= 1 << last
    return order


def _by_size(count: int) -> list[npt.NDArray[np.intp]]:
    """Return the non-empty subsets of `count` members as bit masks, in one array for each number of members."""
    subsets = np.arange(1, 1 << count)
    sizes = sum((subsets >> member) & 1 for member in range(count))
    return [subsets[sizes == size] for size in range(1, count + 1)]


def _improved(length: FloatArray, order: list[int]) -> list[int]:
    """Return a shorter order: reverse and move parts, the best change first, until no change helps or `MOST_WORK` is done."""
    ends = np.pad(length, (0, 1))  # a group that is near to all stands before the first and behind the last
    for _ in range(int(MOST_WORK / len(length) ** 2)):
        path = np.array([len(length), *order, len(length)])
        changes = [_best_turn(ends, path), *(_best_move(ends, path, size) for size in range(1, MOVED + 1))]
        gain, changed = max(changes, key=lambda change: change[0])
        if gain < 1e-12:
            break
        order = changed[1:-1].tolist()
    return order


def _best_turn(length: FloatArray, path: Path) -> tuple[float, Path]:
    """Return the length saved by the best reversal of a part path[i + 1 : j + 1] (two new links), and the new path."""
    here, there = path[:-1], path[1:]
    link = length[here, there]
    gain = link[:, None] + link - length[here[:, None], here] - length[there[:, None], there]
    gain[np.tril_indices(len(link))] = -np.inf
    i, j = np.unravel_index(gain.argmax(), gain.shape)
    return float(gain[i, j]), np.concatenate([path[: i + 1], path[i + 1 : j + 1][::-1], path[j + 1 :]])


def _best_move(length: FloatArray, path: Path, size: int) -> tuple[float, Path]:
    """Return the length saved by the best move of `size` groups to another place (three new links), and the new path."""
    here, there = path[:-1], path[1:]
    link = length[here, there]
    first, last = path[1:-size], path[size:-1]  # of each part that could be moved
    freed = link[: len(first)] + link[size:] - length[path[: len(first)], path[size + 1 :]]
    gain = freed[:, None] + link - length[first[:, None], here] - length[last[:, None], there]
    for offset in range(size + 1):  # not between its own members, nor to its present place
        gain[np.arange(len(first)), np.arange(len(first)) + offset] = -np.inf
    i, j = np.unravel_index(gain.argmax(), gain.shape)
    rest = np.delete(path, np.arange(i + 1, i + 1 + size))
    at = j + 1 if j <= i else j + 1 - size
    return float(gain[i, j]), np.concatenate([rest[:at], path[i + 1 : i + 1 + size], rest[at:]])


@dataclass(eq=False)
class Search:
    """Search for a grid. It ends once `expired()` is true; `progress(done, cost_s)` gets the share done and the best cost."""

    problem: Problem
    _: KW_ONLY
    seed: int = 0
    effort: float = 1.0
    expired: Callable[[], bool] = lambda: False
    progress: Callable[[float, float], None] = lambda done, cost_s: None

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)
        self._work = self.effort * DEFAULT_WORK
        self._steps = int(min(self._work / _step_work(self.problem), self.effort * ENOUGH_STEPS * self.problem.devices))
        self._steps_done = 0
        self._best_s = math.inf

    def __repr__(self) -> str:
        return f"Search({self.problem!r}, {self._steps_done} steps, best {self._best_s:.3f} s)"

    def run(self, start: Grid | None = None) -> Grid:
        """Return the best grid found within the work, starting from `start` or, without it, from layouts of clusters."""
        grids = self._starts() if start is None else self._ranked([_reordered(Arrangement(self.problem, start)).grid])
        idle = 0  # rounds that gained nothing
        for survivors in SURVIVORS:
            grids, before_s = grids[:survivors], self._best_s
            steps = self._steps // len(SURVIVORS) // len(grids)
            if steps >= FEWEST_STEPS and idle < MOST_IDLE and not self.expired():
                grids = self._ranked([*grids, *(self._anneal(grid, steps) for grid in grids)])
                idle = idle + 1 if self._best_s == before_s else 0
        self.progress(1.0, self._best_s)
        return grids[0]

    def _starts(self) -> list[Grid]:
        """Return the layouts with the lowest bounds of cost, connected, the cheapest first."""
        problem = self.problem
        count = min(MAX_LAYOUTS, int(self._work * LAYOUT_SHARE / _order_work(problem)))
        promises: dict[bytes, tuple[float, Grid]] = {}
        for grid in layouts(problem, self._random, count):
            if grid.tobytes() not in promises:
                promises[grid.tobytes()] = _promise(problem, grid)
            if self.expired():
                break
        best = sorted(promises.values(), key=lambda promise: promise[0])[: SURVIVORS[0]]
        hops = range(problem.stages - 1)
        return self._ranked(connected(problem, grid, hops) for _, grid in best)

    def _ranked(self, grids: Iterable[Grid]) -> list[Grid]:
        """Return the different `grids`, the cheapest first, and remember the least cost."""
        different = {grid.tobytes(): grid for grid in grids}
        ranked = sorted(different.values(), key=lambda grid: self.problem.cost(grid).total_s)
        self._best_s = self.problem.cost(ranked[0]).total_s
        return ranked

    def _anneal(self, start: Grid, steps: int) -> Grid:
        """Return the best grid on a random walk of `steps` swaps from `start`, with falling temperature."""
        problem = self.problem
        if self.expired():
            return start
        arrangement = Arrangement(problem, start)
        best, best_s = arrangement.grid.copy(), arrangement.cost.total_s
        for step in range(steps):
            if self.expired():
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
                self.progress(self._steps_done / self._steps, self._best_s)
            cost_s = arrangement.cost.total_s
            if cost_s < best_s:
                best, best_s = arrangement.grid.copy(), cost_s
        return best if self.expired() else _reordered(Arrangement(problem, best)).grid


def _step_work(problem: Problem) -> float:
    devices, replicas = problem.devices, problem.replicas
    return STEP_WORK + devices**2 + 2 * replicas**2 * devices + _order_work(problem) / ORDERED_EVERY


def _order_work(problem: Problem) -> float:
    return float(problem.devices**2 + ORDER_WORK * problem.stages**2)


def _draw(costs_s: FloatArray, temperature_s: float, random: np.random.Generator) -> tuple[int, int] | None:
    """Draw a pair of devices with probability proportional to exp(-cost / temperature); None if no swap is possible."""
    flat = costs_s.ravel()
    least_s = float(flat.min())
    if not np.isfinite(least_s):
        return None
    near = np.flatnonzero(flat <= least_s + DRAWN_WITHIN * temperature_s)
    drawn = near[((least_s - flat[near]) / max(temperature_s, 1e-300) + random.gumbel(size=len(near))).argmax()]
    a, b = divmod(int(drawn), len(costs_s))
    return a, b


def _reordered(arrangement: Arrangement) -> Arrangement:
    """Return the arrangement with its stages in the order of a short path, or as it was if that is not cheaper."""
    problem = arrangement.problem
    order = shortest_path(_hop_bounds(problem, arrangement.grid))
    other = Arrangement(problem, arrangement.grid[order])
    return other if other.cost.total_s < arrangement.cost.total_s else arrangement


def _promise(problem: Problem, grid: Grid) -> tuple[float, Grid]:
    """Return the estimated seconds of the grid with its stages in the order of the shortest path, and the grid in that order.

    A hop counts only with the least that its slowest link can take.
    """
    bounds_s = _hop_bounds(problem, grid)
    order = shortest_path(bounds_s)
    averaging_s = problem.averaging_s[grid[:, :, None], grid[:, None, :]].sum(axis=2).max()
    return float(averaging_s + 2 * bounds_s[order[:-1], order[1:]].sum()), grid[order]


def _hop_bounds(problem: Problem, grid: Grid) -> FloatArray:
    """Return the least seconds [S, S] of the slowest link between two stages: each device has at best its nearest partner."""
    links_s = problem.hop_s[grid[:, None, :, None], grid[None, :, None, :]]
    one_way = links_s.min(axis=3).max(axis=2)
    bounds_s: FloatArray = np.maximum(one_way, one_way.T)
    return bounds_s
