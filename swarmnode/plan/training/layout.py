"""Layout of stages: what all who see the same peers come to alike, without anybody planning for others.

For each cluster of the network, and each number of stages that the model may be cut into, a step is estimated as if everybody had
found a good place. Of the best one every peer knows its own place, which for those outside the cluster is to stand by.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np

from swarmnode.plan.spans.flow import Floats, Indexes
from swarmnode.plan.training.step_forecast import StepForecast
from swarmnode.plan.view import Span

HOLDERS = 2  # that a unit should have, so that losing one loses nothing that was learnt
STANDING_BY = Span(0, 0)
FRAGILE = 3.0  # more of a step, relative, is a second holder of all units worth
LEFT_OUT = 1.5  # times as long a step must take with all, before anybody is left out who may be needed later


@dataclass(frozen=True)
class StageLayout:
    """The stages that the model is cut into, and of N peers the stage of each; nothing for those that are to stand by."""

    stages: Sequence[Span]
    places: Sequence[Span]

    def windows(self, capacity: int) -> list[Span]:
        """Whole stages; of those that are too long for a peer's memory all parts that it can hold."""
        return _parts(self.stages, capacity)


def windows_between(spans: Sequence[Span], units: int, capacity: int) -> list[Span]:
    """What a peer can hold that begins and ends where one of the spans does; of what is too long parts, as above."""
    edges = sorted({0, units, *(edge for span in spans if span.units for edge in span)})
    whole = [Span(start, end) for start, end in combinations(edges, 2) if end - start <= capacity]
    return [*whole, *_parts([Span(*pair) for pair in pairwise(edges)], capacity)]


def _parts(stages: Sequence[Span], capacity: int) -> list[Span]:
    return [
        Span(start, start + size)
        for stage in stages
        for size in [min(stage.units, max(1, capacity))]
        for start in range(stage.start, stage.end - size + 1)
    ]


def common_layout(forecast: StepForecast, capacity_units: Sequence[int]) -> StageLayout:
    """The layout with which fewest places are missing, and then a step takes least, by an estimate that knows nothing of who
    holds what."""
    least, best = (math.inf, math.inf), (cut(forecast.unit_s(1), 1), np.arange(0))
    groups = list(_groups(forecast))
    for count in range(1, forecast.load.units + 1):
        stages = cut(forecast.unit_s(count), count)
        roomy_N = np.array(capacity_units) >= max(stage.units for stage in stages)
        for group in groups:
            able = group[roomy_N[group]]
            missing = max(0, count - len(able))
            if len(able) and missing <= least[0]:
                left_out = LEFT_OUT if len(group) < forecast.network.peers else 1.0
                fragile = 1 + FRAGILE * min(1.0, max(0, HOLDERS * count - len(able)) / count)
                value = missing, left_out * fragile * _estimate_s(forecast, stages, able)
                least, best = min((least, best), (value, (stages, able)), key=lambda one: one[0])
    return _laid(forecast, *best)


def _groups(forecast: StepForecast) -> Iterator[Indexes]:
    """Peers among whom training may stay: all, and every cluster at every scale, once each."""
    members_KN, _ = forecast.clusters.members()
    everybody = np.ones((1, forecast.network.peers))
    for member_N in np.unique(np.concatenate([everybody, members_KN]), axis=0):
        yield np.flatnonzero(member_N)


def _laid(forecast: StepForecast, stages: Sequence[Span], able: Indexes) -> StageLayout:
    """Stage after stage along the clusters, over and over, so that pipelines cross as few slow links as they can."""
    places, taking_part = [STANDING_BY] * forecast.network.peers, set(able.tolist())
    along = [peer for peer in forecast.clusters.order if peer in taking_part]
    for number, peer in enumerate(along):
        places[peer] = stages[number % len(stages)]
    return StageLayout(stages, places)


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
