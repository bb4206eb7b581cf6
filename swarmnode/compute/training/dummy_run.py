"""Dummy run: a microbatch of made-up values through some units, there and back, to see how long that takes on this device.

Nothing of it stays: a learner begins its step anew behind it, and whatever is random follows from the run's seed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from swarmnode.compute.stopwatch import synchronize
from swarmnode.compute.training.learner import Learner
from swarmnode.compute.training.segment import Values, moved

BUDGET_S = 1.0  # for all passes, where that is enough for the fewest
FEWEST_PASSES, MOST_PASSES = 2, 5
LEASE = -1  # no coordinator's
SMALL = 1e-3  # gradients that overflow nowhere


def dummy_run_s(learner: Learner, start: int, end: int, clock: Callable[[], float]) -> float:
    """Seconds for a microbatch of the learner's run through units [start, end): the median of some passes; the first one warms up.
    For a learner that has counted nothing yet.

    Raises CheckpointError where nobody but the data knows what comes into the units, ProtocolError and NotFinite where they cannot
    work with what is made up.
    """
    segment, run = learner.segment, learner.run
    values, labels = segment.dummies(start, run.microbatch, run.sequence)
    values, labels = moved(values, segment.device), moved(labels, segment.device)
    took_s: list[float] = []
    while len(took_s) < FEWEST_PASSES or (len(took_s) < MOST_PASSES and sum(took_s) < BUDGET_S):
        began_s = clock()
        _there_and_back(learner, start, end, values, labels)
        synchronize(segment.device)
        took_s.append(max(clock() - began_s, 1e-9))
    return statistics.median(took_s[1:])


def _there_and_back(learner: Learner, start: int, end: int, values: Values, labels: Values) -> None:
    try:
        outputs = learner.forward(LEASE, 0, start, end, values, labels)
        received = outputs if end < learner.segment.units else ()  # of a loss no gradient comes
        grads = tuple(torch.full_like(one, SMALL) if one.is_floating_point() else None for one in received)
        learner.backward(LEASE, grads)
    finally:
        learner.discard()  # else the next pass would go through what is counted
