"""How many units each stage of a pipeline holds: so many that no stage is slower than it must be, and none overflows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from swarmnode.plan.offline.scenario import FloatArray
from swarmnode.plan.view import Span


@dataclass(frozen=True)
class StageRoom:
    """What the devices of one stage offer together: work per second, and the bytes that fit into the smallest of them."""

    work_per_s: float
    room_bytes: float


def split(
    work: Sequence[float],
    unit_bytes: Sequence[int],
    stages: Sequence[StageRoom],
    entering_s: Callable[[int], FloatArray | float] = lambda _: 0.0,
) -> list[Span] | None:
    """Cut the units into one span per stage, in order, such that the slowest stage, or hop, is as fast as can be.

    `work` and `unit_bytes` are per unit; `entering_s` tells of a stage's number what the hop into it takes for each unit that
    it may begin with, where that differs. None where memory does not allow any cut. A dynamic programme over stages and
    units: the slowest of the stages so far, for each number of units that they may hold together.
    """
    work_before = np.concatenate([[0.0], np.cumsum(work)])
    bytes_before = np.concatenate([[0.0], np.cumsum(unit_bytes)])
    units = len(work)
    slowest_s = np.full(units + 1, np.inf)
    slowest_s[0] = 0.0
    starts = np.zeros((len(stages), units + 1), dtype=np.intp)
    for number, stage in enumerate(stages):
        before_s = np.maximum(slowest_s, np.append(entering_s(number) + np.zeros(units), 0.0))
        reached_s = np.maximum(before_s[:, None], _span_s(work_before, bytes_before, stage))
        starts[number] = reached_s.argmin(axis=0)
        slowest_s = reached_s.min(axis=0)
    if not np.isfinite(slowest_s[units]):
        return None
    spans, end = [], units
    for number in reversed(range(len(stages))):
        start = int(starts[number, end])
        spans.append(Span(start, end))
        end = start
    return spans[::-1]


def _span_s(work_before: FloatArray, bytes_before: FloatArray, stage: StageRoom) -> FloatArray:
    """[U + 1, U + 1]: seconds of the span [start, end) on a stage; infinite where it is empty or does not fit."""
    seconds: FloatArray = (work_before - work_before[:, None]) / stage.work_per_s
    held_bytes = bytes_before - bytes_before[:, None]
    seconds[held_bytes > stage.room_bytes] = np.inf
    seconds[np.tril_indices(len(seconds))] = np.inf
    return seconds


def units_that_fit(unit_bytes: Sequence[int], rooms_bytes: Sequence[float]) -> int:
    """How many units, from the first on, find room in stages that are filled one after the other."""
    held = 0
    for room_bytes in rooms_bytes:
        left_bytes = room_bytes
        while held < len(unit_bytes) and unit_bytes[held] <= left_bytes:
            left_bytes -= unit_bytes[held]
            held += 1
    return held
