"""Arrangement: a grid in improvement, and the cost of every swap of two devices in it, all at once as matrices.

Swapping a and b changes the averaging of their two stages and the hops on both sides of each. The cost of b in a's place depends
only on a's stage and neighbours, so a matrix [D, D] of "b in a's place" gives all swaps. Pairs in adjacent stages share a hop and
need a correction. Unused devices wait on a bench, which is stage S.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from swarmnode.plan.offline.grid import Cost, Grid, Problem
from swarmnode.plan.offline.scenario import FloatArray


def bottleneck_matching(cost: FloatArray, columns: Sequence[int] | None = None) -> list[int]:
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
        better = _perfect_matching(_allowed(cost, values[probe]))
        if better is None:
            low = probe + 1
        else:
            columns, high = better, probe
        probe = (low + high) // 2
    return columns


def _allowed(cost: FloatArray, most: float) -> list[int]:
    """Return, for each row of `cost`, the columns of cost `most` or less, as the bits of a number."""
    packed = np.packbits(cost <= most, axis=1, bitorder="little")
    return [int.from_bytes(row.tobytes(), "little") for row in packed]


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

    def swap_costs(self) -> FloatArray:
        """Return the total seconds [D, D] after each swap of two devices, before pipelines are connected anew.

        They are infinite for two devices of one stage, for two unused ones, and for devices of different kinds.
        """
        stage = self._stage
        averaging_s = np.maximum(self._replaced_s, self._replaced_s.T)
        np.maximum(averaging_s, _without_two(self._averaging_s)[stage[:, None], stage], out=averaging_s)
        total_s: FloatArray = averaging_s + 2 * self._hops_after_swap()
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

    def _hops_after_swap(self) -> FloatArray:
        """Return the seconds [D, D] of the slowest links of all hops together, after each swap."""
        devices = self.problem.devices
        here, there = self.grid[:-1], self.grid[1:]
        before, after = np.full(devices, devices), np.full(devices, devices)
        after[here], before[there] = there, here
        links_s = self._hop_s[here, there]
        others_s = _without_two_each(links_s)
        rest_before_s, rest_after_s = np.zeros(devices), np.zeros(devices)  # slowest of the hop's other links
        rest_after_s[here] = rest_before_s[there] = np.einsum("hrr->hr", others_s)
        entering_s = np.maximum(rest_before_s[:, None], self._hop_s[before, :devices])
        leaving_s = np.maximum(rest_after_s[:, None], self._hop_s[after, :devices])
        hop_s = np.pad(links_s.max(axis=1), 1)  # none before the first stage, none behind the last
        around_s = np.append(hop_s[:-1] + hop_s[1:], 0.0)  # of each stage, and the bench
        replaced_s = entering_s + leaving_s - around_s[self._stage][:, None]
        result: FloatArray = hop_s.sum() + replaced_s + replaced_s.T
        if self.problem.stages > 1:
            self._correct_adjacent(result, hop_s, others_s, entering_s, leaving_s)
        return result

    def _correct_adjacent(
        self, result: FloatArray, hop_s: FloatArray, others_s: FloatArray, entering_s: FloatArray, leaving_s: FloatArray
    ) -> None:
        """Correct `result` for swaps across one hop, as both its ends change. [H, R, R]: a (stage h, pipeline p), b (h + 1, q)."""
        here, there = self.grid[:-1], self.grid[1:]
        a, b = here[:, :, None], there[:, None, :]
        behind_a, before_b = there[:, :, None], here[:, None, :]
        between_s = np.maximum(others_s, np.maximum(self._hop_s[b, behind_a], self._hop_s[before_b, a]))
        same = np.arange(self.problem.replicas)
        between_s[:, same, same] = hop_s[1:-1, None]  # a and b of one pipeline just turn their link round
        unchanged_s = hop_s.sum() - (hop_s[:-2] + hop_s[1:-1] + hop_s[2:])
        result[a, b] = result[b, a] = unchanged_s[:, None, None] + entering_s[a, b] + between_s + leaving_s[b, a]


def _without_two(values: FloatArray) -> FloatArray:
    """Return [N + 1, N + 1]: the maximum of N values without the i-th and the j-th, 0 if none is left. Index N leaves none out."""
    count = len(values)
    padded = np.concatenate([values, np.zeros(3)])
    first, second, third = np.argsort(-padded, kind="stable")[:3]
    rest = np.full((count + 3, count + 3), padded[first])
    rest[first, :] = rest[:, first] = padded[second]
    rest[first, second] = rest[second, first] = padded[third]
    within: FloatArray = rest[: count + 1, : count + 1]
    return within


def _without_two_each(values: FloatArray) -> FloatArray:
    """Return [H, R, R] for values [H, R]: per row, the maximum without the p-th and the q-th, 0 if none is left."""
    rows, count = values.shape
    padded = np.concatenate([values, np.zeros((rows, 3))], axis=1)
    order = np.argsort(-padded, axis=1, kind="stable")[:, :3]
    row = np.arange(rows)
    first, second = order[:, 0], order[:, 1]
    top = np.take_along_axis(padded, order, axis=1)
    rest: FloatArray = np.broadcast_to(top[:, 0, None, None], (rows, count + 3, count + 3)).copy()
    rest[row, first, :] = top[:, 1, None]
    rest[row, :, first] = top[:, 1, None]
    rest[row, first, second] = rest[row, second, first] = top[:, 2]
    return rest[:, :count, :count]
