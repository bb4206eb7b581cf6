"""Placement for training: which units a peer should hold so that a step becomes shortest, and how many.

How much to hold follows from the network alone: for each number of stages that the model may be cut into, a step is estimated as
if everybody had found a good place; all who see the same peers come to the same stages, so that spans meet without anybody
planning for others. Where to stand is the best response to where the others stand (`step_forecast.py`), each peer for itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from swarmnode.plan.spans.flow import Floats, Indexes
from swarmnode.plan.training.step_forecast import StepForecast
from swarmnode.plan.view import Span

HYSTERESIS = 0.002  # relative: a step must become so much shorter


@dataclass(frozen=True)
class TrainingPeers:
    """N peers: what they hold now (nothing, where the span is empty), and how many units fit into the memory of each."""

    spans: Sequence[Span]
    capacity_units: Sequence[int]


def choose_training_span(
    forecast: StepForecast, stages: Sequence[Span], peers: TrainingPeers, peer: int
) -> Span | None:
    """The span that this one should hold, its own where none is better; None where, whatever it takes, units would have nobody."""
    windows = _windows(stages, peers.capacity_units[peer])
    held = {unit for other, span in enumerate(peers.spans) if other != peer for unit in range(*span)}
    most = max(len(held.union(range(*window))) for window in windows)
    if most < forecast.load.units:
        return None
    windows = [window for window in windows if len(held.union(range(*window))) == most]
    step_W = forecast.step_s(_settled(stages, peers), peer, windows)
    best, now = int(step_W.argmin()), peers.spans[peer]
    if now in windows and step_W[best] >= step_W[windows.index(now)] * (1 - HYSTERESIS):
        return now
    return windows[best]


def _settled(stages: Sequence[Span], peers: TrainingPeers) -> list[Span]:
    """Who holds something else than one of the stages is about to leave it, and counts as not there yet."""
    return [
        span if span in _windows(stages, capacity) else Span(0, 0)
        for span, capacity in zip(peers.spans, peers.capacity_units, strict=True)
    ]


def cut(unit_s_U: Floats, count: int) -> list[Span]:
    """The units cut into so many stages that take about equally long (the least sum of squares), of at least one unit each."""
    units = len(unit_s_U)
    done_s = np.concatenate([[0.0], np.cumsum(unit_s_U)])
    stage_s = done_s[None, :] - done_s[:, None]  # [start, end]
    square = np.where(np.arange(units + 1)[:, None] < np.arange(units + 1), stage_s**2, np.inf)
    least, starts = square[0], list[Indexes]()
    for _ in range(count - 1):
        total = least[:, None] + square
        starts.append(total.argmin(axis=0))
        least = total.min(axis=0)
    ends = [units]
    for start_of in reversed(starts):
        ends.append(int(start_of[ends[-1]]))
    return [Span(start, end) for start, end in pairwise([0, *reversed(ends)])]


def _windows(stages: Sequence[Span], capacity: int) -> list[Span]:
    """Whole stages; of those that are too long for a peer's memory all parts that it can hold."""
    return [
        Span(start, start + size)
        for stage in stages
        for size in [min(stage.units, max(1, capacity))]
        for start in range(stage.start, stage.end - size + 1)
    ]


def common_stages(forecast: StepForecast, capacity_units: Sequence[int]) -> list[Span]:
    """The stages with which a step takes least, by an estimate that knows nothing of who holds what."""
    units = forecast.load.units
    best_s, best = math.inf, cut(forecast.unit_s(units), units)
    for count in range(1, units + 1):
        stages = cut(forecast.unit_s(count), count)
        longest = max(stage.units for stage in stages)
        able = np.array([peer for peer, fitting in enumerate(capacity_units) if fitting >= longest], np.intp)
        estimate_s = _estimate_s(forecast, stages, able) if len(able) else math.inf
        if estimate_s < best_s:
            best_s, best = estimate_s, stages
    return best


def _estimate_s(forecast: StepForecast, cut_out: Sequence[Span], able: Indexes) -> float:
    """A step of those who can hold a stage. Pipelines stay in clusters as far as these are large enough; replicas are all over the
    network. Fewer peers than stages take as many times longer."""
    load, network, stages = forecast.load, forecast.network, len(cut_out)
    replicas = max(1.0, len(able) / stages)
    leaving_LC = np.ceil(stages / forecast.clusters.sizes(able)) - 1  # hops of a pipeline that leave a cluster
    hops_s = float((forecast.clusters.rise_L[:, None] * leaving_LC).sum(axis=0).mean())
    compute_s = load.microbatches * float(load.work_U.sum() / network.work_per_s_N[able].sum())
    line_s = 2 * load.microbatches * hops_s / max(1, stages - 1) / replicas
    gradient_bytes = 2 * max(float(load.gradient_bytes_U[slice(*stage)].sum()) for stage in cut_out)
    pairs = np.ix_(able, able)
    averaging_s = gradient_bytes * (1 - 1 / replicas) * float(forecast.line_N[able].max())
    if replicas > 1:
        averaging_s += gradient_bytes / replicas * float(forecast.path_NN[pairs].max())
        averaging_s += 2 * float(network.delay_NN[pairs].max())
    step_s = compute_s + line_s + 2 * hops_s + forecast.latency_s + averaging_s
    return step_s * max(1.0, stages / len(able))
