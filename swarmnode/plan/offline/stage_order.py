"""In which order groups of devices should be the stages: the shortest open path through all of them.

Exact by dynamic programming over subsets (Held and Karp 1962) for up to `EXACT` groups; beyond, a given path is improved by turning
parts of it round (2-opt) and by moving parts of it elsewhere (Or 1976) as long as that helps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from swarmnode.plan.offline.scenario import FloatArray

EXACT = 10  # 2^10 x 10 partial paths; each further group would double that
MOVED = 3  # the longest part that is moved elsewhere
MOST_WORK = 2e7  # elements of the matrices in which changes are looked for
Path = npt.NDArray[np.intp]


def shortest_path(length: FloatArray, start: Sequence[int] | None = None) -> list[int]:
    """An order of the S groups whose consecutive lengths [S, S] (symmetric) sum up to little, never to more than `start`'s."""
    count = len(length)
    start = list(range(count) if start is None else start)
    best = _held_karp(length) if count <= EXACT else _improved(length, start)
    return best if path_length(length, best) < path_length(length, start) else start


def path_length(length: FloatArray, order: Sequence[int]) -> float:
    """Sum of the lengths between consecutive groups."""
    return float(length[order[:-1], order[1:]].sum())


def _held_karp(length: FloatArray) -> list[int]:
    """shortest[subset, last]: of the paths through a subset that end at one of its members."""
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
    """The non-empty subsets of `count` members, as bits, by their number of members."""
    subsets = np.arange(1, 1 << count)
    sizes = sum((subsets >> member) & 1 for member in range(count))
    return [subsets[sizes == size] for size in range(1, count + 1)]


def _improved(length: FloatArray, order: list[int]) -> list[int]:
    """Turn and move parts of the path, the best change first, until nothing of the kind shortens it (or it took too long)."""
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
    """Turn path[i + 1 : j + 1] round: two links are replaced. What that gains, and the new path."""
    here, there = path[:-1], path[1:]
    link = length[here, there]
    gain = link[:, None] + link - length[here[:, None], here] - length[there[:, None], there]
    gain[np.tril_indices(len(link))] = -np.inf
    i, j = np.unravel_index(gain.argmax(), gain.shape)
    return float(gain[i, j]), np.concatenate([path[: i + 1], path[i + 1 : j + 1][::-1], path[j + 1 :]])


def _best_move(length: FloatArray, path: Path, size: int) -> tuple[float, Path]:
    """Move path[i + 1 : i + 1 + size] between path[j] and path[j + 1]: three links are replaced."""
    here, there = path[:-1], path[1:]
    link = length[here, there]
    first, last = path[1:-size], path[size:-1]  # of each part that could be moved
    freed = link[: len(first)] + link[size:] - length[path[: len(first)], path[size + 1 :]]
    gain = freed[:, None] + link - length[first[:, None], here] - length[last[:, None], there]
    for offset in range(size + 1):  # not between its own members, nor where it is
        gain[np.arange(len(first)), np.arange(len(first)) + offset] = -np.inf
    i, j = np.unravel_index(gain.argmax(), gain.shape)
    rest = np.delete(path, np.arange(i + 1, i + 1 + size))
    at = j + 1 if j <= i else j + 1 - size
    return float(gain[i, j]), np.concatenate([rest[:at], path[i + 1 : i + 1 + size], rest[at:]])
