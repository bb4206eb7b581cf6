"""The perfect matching between two groups whose slowest pair is fastest (the bottleneck assignment problem).

Bisection over the pairs' values; whether a value suffices is decided by augmenting paths (Kuhn 1955) on sets of columns kept as
bits of an integer. Groups here have a few to a few hundred members, where this is faster than a general solver's set-up.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from swarmnode.plan.offline.scenario import FloatArray


def bottleneck_matching(cost: FloatArray, columns: Sequence[int] | None = None) -> list[int]:
    """For each row of `cost` [R, R] its column, such that the dearest pair is as cheap as can be.

    `columns` is a matching that is known already; it is returned as it is where it cannot be beaten.
    """
    columns = list(range(len(cost)) if columns is None else columns)
    reached = cost[range(len(cost)), columns].max()
    least = max(cost.min(axis=1).max(), cost.min(axis=0).max())
    values = np.unique(cost[(cost >= least) & (cost < reached)])
    low, high = 0, len(values)  # values[high] is reached, none below values[low] is
    probe = high - 1  # most matchings that come here cannot be beaten, which the value next below tells
    while low < high:
        better = _perfect_matching(_allowed(cost, values[probe]))
        if better is None:
            low = probe + 1
        else:
            columns, high = better, probe
        probe = (low + high) // 2
    return columns


def _allowed(cost: FloatArray, most: float) -> list[int]:
    """Per row, the columns that cost at most that, as bits."""
    packed = np.packbits(cost <= most, axis=1, bitorder="little")
    return [int.from_bytes(row.tobytes(), "little") for row in packed]


def _perfect_matching(allowed: Sequence[int]) -> list[int] | None:
    """For each row a column of its own among those allowed; None where there is none for all."""
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
    came_from: dict[int, int] = {}  # column -> the row from which it was reached
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
    """Hand the columns of a chain on, from its free end back to the row that had none."""
    while True:
        row = came_from[column]
        previous = next((held for held, holder in enumerate(owner) if holder == row), -1)
        owner[column] = row
        if row == root:
            return
        column = previous
