"""Grid search: the placement of S stages x R pipelines on a network such that the traffic of a step takes least time.

The search begins with layouts of clusters and improves the most promising ones by swaps of devices. Swap after swap is drawn with
a probability proportional to exp(-cost / temperature) among all swaps (annealing without rejection: Bortz, Kalos and Lebowitz
1975), while the temperature falls. The better half goes into the next round, with twice the steps for each. After each swap the
bottleneck matching connects the pipelines anew; the order of stages is the shortest path through them.

Work is counted, not timed: the same problem, seed and effort give the same grid. `expired` can only end the search early.

Arrangement: a grid in improvement, and the cost of every swap of two devices in it, all at once as matrices.

Swapping a and b changes the averaging of their two stages and the hops on both sides of each. The cost of b in a's place depends
only on a's stage and neighbours, so a matrix [D, D] of "b in a's place" gives all swaps. Pairs in adjacent stages share a hop and
need a correction. Unused devices wait on a bench, which is stage S.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np
import numpy.typing as npt

from swarmnode.plan.offline.grid import Cost, Grid, Problem, layouts
from swarmnode.plan.spans.flow import Floats


def bottleneck_matching(cost: Floats, columns: Sequence[int] | None = None) -> list[int]:
    """Return a different column for each row of `cost` [R, R], such that the dearest pair is as cheap as possible.

    `columns` is a known matching, by default 0, 1, …; it is returned unchanged if no other has a cheaper dearest pair.
    """
    columns = list(range(len(cost)) if columns is None else columns)
    reached = cost[range(len(cost)), columns].max()
    least = max(cost.min(axis=1).max(), cost.min(axis=0).max())
    values = np.unique(cost[(cost >= least) & (cost < reached)])
    low, high = 0, len(values)  # values[high] is reached, none below values[low] is
    probe = high - 1  # most known matchings cannot be improved: the value next below shows that at once
    while low < high:
        packed = np.packbits(cost <= values[probe], axis=1, bitorder="little")
        better = _perfect_matching([int.from_bytes(row.tobytes(), "little") for row in packed])
        if better is None:
            low = probe + 1
        else:
            columns, high = better, probe
        probe = (low + high) // 2
    return columns


def _perfect_matching(allowed: Sequence[int]) -> list[int] | None:
    """Return an allowed column for each row, all different; None if that is impossible. `allowed` has columns as bits."""
    owner = [-1] * len(allowed)
    free = (1 << len(allowed)) - 1
    for row in range(len(allowed)):
        seen = _augment(row, allowed, owner, free)
        if seen < 0:
            return None
        free &= ~seen
    columns = [0] * len(allowed)
    for column, row in enumerate(owner):
        columns[row] = column
    return columns


def _augment(row: int, allowed: Sequence[int], owner: list[int], free: int) -> int:
    """Give `row` a column by moving others along a shortest chain. Returns the free column taken, as a bit, or -1."""
    came_from: dict[int, int] = {}  # column -> the row that reached it
    pending, unseen = [row], (1 << len(allowed)) - 1
    for current in pending:
        reached = allowed[current] & unseen
        unseen &= ~reached
        if reached & free:
            bit = reached & free & -(reached & free)
            column = bit.bit_length() - 1
            came_from[column] = current
            _shift(column, row, came_from, owner)
            return bit
        while reached:
            column = (reached & -reached).bit_length() - 1
            reached &= reached - 1
            came_from[column] = current
            pending.append(owner[column])
    return -1


def _shift(column: int, root: int, came_from: dict[int, int], owner: list[int]) -> None:
    """Pass the columns of a chain on, from its free `column` back to row `root`, which had no column."""
    while True:
        row = came_from[column]
        previous = next((held for held, holder in enumerate(owner) if holder == row), -1)
        owner[column] = row
        if row == root:
            return
        column = previous


def connected(problem: Problem, grid: Grid, hops: Iterable[int]) -> Grid:
    """Return the grid with pipelines connected anew over `hops` (hop h: stage h to h + 1), by the fastest matching of links."""
    grid = grid.copy()
    for hop in hops:
        columns = bottleneck_matching(problem.hop_s[grid[hop][:, None], grid[hop + 1]])
        grid[hop + 1 :] = grid[hop + 1 :, columns]
    return grid


class Arrangement:
    """Grid [S, R] with tables that give the cost of all swaps quickly. Pipelines are kept optimally connected."""

    def __init__(self, problem: Problem, grid: Grid) -> None:
        self.problem = problem
        self.grid = connected(problem, grid, range(problem.stages - 1))
        devices = problem.devices
        # Device number `devices` stands for no device: before the first stage, behind the last, around the bench.
        self._hop_s = np.zeros((devices + 1, devices + 1))
        self._hop_s[:devices, :devices] = problem.hop_s
        self._stage = np.full(devices, problem.stages)
        self._averaging_s = np.zeros(problem.stages)
        self._replaced_s = np.zeros((devices, devices))  # averaging of a's stage with b in a's place
        for stage in range(problem.stages):
            self._enter(stage)

    def __repr__(self) -> str:
        return f"Arrangement({self.problem!r}, {self.cost.total_s:.3f} s)"

    @property
    def cost(self) -> Cost:
        """Seconds of traffic of a step with the present grid."""
        return Cost(float(self._averaging_s.max()), self.problem.pipeline_s(self.grid))

    def swap(self, a: int, b: int) -> None:
        """Exchange devices `a` and `b` of different stages, or a used device and an unused one; then connect pipelines anew."""
        stages = sorted({int(self._stage[a]), int(self._stage[b])} - {self.problem.stages})
        place_a, place_b = self.grid == a, self.grid == b
        self.grid[place_a], self.grid[place_b] = b, a
        self._stage[[a, b]] = self._stage[[b, a]]
        self._replaced_s[[a, b]] = 0.0  # as the bench has it; a stage enters its own below
        for stage in stages:
            self._enter(stage)
        hops = {hop for stage in stages for hop in (stage - 1, stage) if 0 <= hop < self.problem.stages - 1}
        self.grid = connected(self.problem, self.grid, sorted(hops))

    def swap_costs(self) -> Floats:
        """Return the total seconds [D, D] after each swap of two devices, before pipelines are connected anew.

        They are infinite for two devices of one stage, for two unused ones, and for devices of different kinds.
        """
        stage = self._stage
        averaging_s = np.maximum(self._replaced_s, self._replaced_s.T)
        others_s = _without_two(np.append(self._averaging_s, 0.0)[None])[0]  # the bench averages nothing
        np.maximum(averaging_s, others_s[stage[:, None], stage], out=averaging_s)
        total_s: Floats = averaging_s + 2 * self._hops_after_swap()
        total_s[stage[:, None] == stage] = np.inf
        if self.problem.kinds is not None:
            total_s[self.problem.kinds[:, None] != self.problem.kinds] = np.inf
        return total_s

    def _enter(self, stage: int) -> None:
        """Update the tables of averaging costs from the present devices of `stage`."""
        members = self.grid[stage]
        averaging = self.problem.averaging_s
        self._stage[members] = stage
        among = averaging[members[:, None], members]
        paid = among.sum(axis=1)
        self._averaging_s[stage] = paid.max()
        # [leaves, pays, comes]: what each member pays when one leaves and another comes
        pays = (paid - among)[:, :, None] + averaging[members][None, :, :]
        pays[np.arange(len(members)), np.arange(len(members))] = 0.0
        comes = averaging[members].sum(axis=0) - averaging[members]
        self._replaced_s[members] = np.maximum(pays.max(axis=1), comes)

    def _hops_after_swap(self) -> Floats:
        """Return the seconds [D, D] of the slowest links of all hops together, after each swap."""
        devices = self.problem.devices
        here, there = self.grid[:-1], self.grid[1:]
        before, after = np.full(devices, devices), np.full(devices, devices)
        after[here], before[there] = there, here
        links_s = self._hop_s[here, there]
        others_s = _without_two(links_s)
        rest_before_s, rest_after_s = np.zeros(devices), np.zeros(devices)  # slowest of the hop's other links
        rest_after_s[here] = rest_before_s[there] = np.einsum("hrr->hr", others_s)
        entering_s = np.maximum(rest_before_s[:, None], self._hop_s[before, :devices])
        leaving_s = np.maximum(rest_after_s[:, None], self._hop_s[after, :devices])
        hop_s = np.pad(links_s.max(axis=1), 1)  # none before the first stage, none behind the last
        around_s = np.append(hop_s[:-1] + hop_s[1:], 0.0)  # of each stage, and the bench
        replaced_s = entering_s + leaving_s - around_s[self._stage][:, None]
        result: Floats = hop_s.sum() + replaced_s + replaced_s.T
        if self.problem.stages > 1:
            # Across one hop both ends change: [H, R, R], a (stage h, pipeline p), b (h + 1, q).
            a, b = here[:, :, None], there[:, None, :]
            behind_a, before_b = there[:, :, None], here[:, None, :]
            between_s = np.maximum(others_s, np.maximum(self._hop_s[b, behind_a], self._hop_s[before_b, a]))
            same = np.arange(self.problem.replicas)
            between_s[:, same, same] = hop_s[1:-1, None]  # a and b of one pipeline just turn their link round
            unchanged_s = hop_s.sum() - (hop_s[:-2] + hop_s[1:-1] + hop_s[2:])
            result[a, b] = result[b, a] = unchanged_s[:, None, None] + entering_s[a, b] + between_s + leaving_s[b, a]
        return result


def _without_two(values: Floats) -> Floats:
    """Return [H, R, R] for values [H, R]: per row, the maximum without the p-th and the q-th, 0 if none is left."""
    rows, count = values.shape
    padded = np.concatenate([values, np.zeros((rows, 3))], axis=1)
    order = np.argsort(-padded, axis=1, kind="stable")[:, :3]
    row = np.arange(rows)
    first, second = order[:, 0], order[:, 1]
    top = np.take_along_axis(padded, order, axis=1)
    rest: Floats = np.broadcast_to(top[:, 0, None, None], (rows, count + 3, count + 3)).copy()
    rest[row, first, :] = top[:, 1, None]
    rest[row, :, first] = top[:, 1, None]
    rest[row, first, second] = rest[row, second, first] = top[:, 2]
    return rest[:, :count, :count]


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


def shortest_path(length: Floats, start: Sequence[int] | None = None) -> list[int]:
    """Return an order of S groups with a short path through all of them; never longer than `start` (by default 0, 1, …).

    `length` [S, S] is symmetric. Up to `EXACT` groups the path is the shortest.
    """
    count = len(length)
    start = list(range(count) if start is None else start)
    best = _held_karp(length) if count <= EXACT else _improved(length, start)
    return best if path_length(length, best) < path_length(length, start) else start


def path_length(length: Floats, order: Sequence[int]) -> float:
    """Return the sum of the lengths between consecutive groups of `order`."""
    return float(length[order[:-1], order[1:]].sum())


def _held_karp(length: Floats) -> list[int]:
    """Return the shortest path through all groups (Held and Karp): shortest[subset, last] is the shortest that ends at `last`."""
    count = len(length)
    shortest = np.full((1 << count, count), np.inf)
    before = np.zeros((1 << count, count), dtype=np.intp)
    for group in range(count):
        shortest[1 << group, group] = 0.0
    every = np.arange(1, 1 << count)  # the non-empty subsets as bit masks
    sizes = sum((every >> member) & 1 for member in range(count))
    for size in range(2, count + 1):
        subsets = every[sizes == size]
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


def _improved(length: Floats, order: list[int]) -> list[int]:
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


def _best_turn(length: Floats, path: Path) -> tuple[float, Path]:
    """Return the length saved by the best reversal of a part path[i + 1 : j + 1] (two new links), and the new path."""
    here, there = path[:-1], path[1:]
    link = length[here, there]
    gain = link[:, None] + link - length[here[:, None], here] - length[there[:, None], there]
    gain[np.tril_indices(len(link))] = -np.inf
    i, j = np.unravel_index(gain.argmax(), gain.shape)
    return float(gain[i, j]), np.concatenate([path[: i + 1], path[i + 1 : j + 1][::-1], path[j + 1 :]])


def _best_move(length: Floats, path: Path, size: int) -> tuple[float, Path]:
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
        devices, replicas = self.problem.devices, self.problem.replicas
        step_work = STEP_WORK + devices**2 + 2 * replicas**2 * devices + _order_work(self.problem) / ORDERED_EVERY
        self._steps = int(min(self._work / step_work, self.effort * ENOUGH_STEPS * devices))
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


def _order_work(problem: Problem) -> float:
    return float(problem.devices**2 + ORDER_WORK * problem.stages**2)


def _draw(costs_s: Floats, temperature_s: float, random: np.random.Generator) -> tuple[int, int] | None:
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


def _hop_bounds(problem: Problem, grid: Grid) -> Floats:
    """Return the least seconds [S, S] of the slowest link between two stages: each device has at best its nearest partner."""
    links_s = problem.hop_s[grid[:, None, :, None], grid[None, :, None, :]]
    one_way = links_s.min(axis=3).max(axis=2)
    bounds_s: Floats = np.maximum(one_way, one_way.T)
    return bounds_s
