"""Pipelines of a plan, and how a step's microbatches are shared out among them: as the planner counts on it, by speed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from swarmnode.net.interfaces import PeerId
from swarmnode.plan.training.wiring import Replica


def beat_s(pipeline: Sequence[PeerId], workers: Mapping[PeerId, Replica]) -> float:
    """Seconds between two microbatches that leave it: those of its slowest stage, others taking the place of lost ones; endless
    where all are lost."""
    return max(
        (workers[peer].span.units * workers[peer].unit_s for peer in pipeline if peer in workers), default=math.inf
    )


def share_out(microbatches: int, beats_s: Sequence[float]) -> list[int]:
    """The pipeline of each microbatch: the one that would be done with it first, all beginning at once."""
    given = [0] * len(beats_s)
    shared = []
    for _ in range(microbatches):
        first = min(range(len(beats_s)), key=lambda number: ((given[number] + 1) * beats_s[number], given[number]))
        given[first] += 1
        shared.append(first)
    return shared
