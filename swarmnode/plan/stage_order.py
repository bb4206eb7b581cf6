"""In which order groups of devices should be the stages: the shortest open path through all of them.

Exact by dynamic programming over subsets (Held and Karp 1962) for up to `EXACT` groups; beyond, a given path is improved by turning
parts of it round (2-opt) and by moving parts of it elsewhere (Or 1976) as long as that helps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from swarmnode.plan.scenario import FloatArray

EXACT = 10  # 2^10 x 10 partial paths; each further group would double that
MOVED = 3  # the longest part that is moved elsewhere


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
    """Turn and move parts of the path until nothing of the kind shortens it."""
    while True:
        candidates = (_changed(order, begin, end, at) for begin, end, at in _changes(len(order)))
        current = path_length(length, order)
        shorter = next((path for path in candidates if path_length(length, path) < current - 1e-12), None)
        if shorter is None:
            return order
        order = shorter


def _changes(count: int) -> list[tuple[int, int, int]]:
    """(begin, end, at): turn [begin, end) round where at < 0, else move it to position `at` of the rest."""
    turns = [(begin, end, -1) for begin in range(count) for end in range(begin + 2, count + 1)]
    parts = [(begin, begin + size) for size in range(1, MOVED + 1) for begin in range(count - size + 1)]
    moves = [(begin, end, at) for begin, end in parts for at in range(count - (end - begin) + 1) if at != begin]
    return turns + moves


def _changed(order: list[int], begin: int, end: int, at: int) -> list[int]:
    if at < 0:
        return order[:begin] + order[begin:end][::-1] + order[end:]
    rest = order[:begin] + order[end:]
    return rest[:at] + order[begin:end] + rest[at:]
