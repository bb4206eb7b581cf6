"""Layout of stages: what all who see the same peers come to alike, without anybody planning for others.

For each cluster of the network, and each number of stages that the model may be cut into, a step is estimated as if everybody had
found a good place; the best few are laid out, their steps forecast, and the best of these run dry. Of the best one every peer knows
its own place, which for those outside the cluster is to stand by.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, pairwise

import numpy as np

from swarmnode.plan.holders import HOLDERS, fragility
from swarmnode.plan.spans.flow import Bools, Floats, Indexes
from swarmnode.plan.training.step_forecast import StepForecast
from swarmnode.plan.training.wiring import SAME
from swarmnode.plan.view import Span

STANDING_BY = Span(0, 0)
CLEARLY = 1.2  # times as long a step must take before units have fewer holders, which survive losses less well
ALIKE = 1.25  # times as fast: still the same card
SLIGHTLY = 1.05  # likewise, before they have as many: who sees a little more than others comes to the same layout
SHORTLIST = 20  # candidates of which steps are forecast
DRY_RUNS = 10  # layouts of which a step is run dry, at most, and
WITHIN = 1.25  # times what is forecast of the best one: so far off are forecasts of arrangements
LEFT_OUT = 1.2  # times as long a step must take with all, before most of a few are left out, who may be needed later
NOTICED_S = 1.0  # of a step: for less than that nobody is left out, nor a stage left to one holder
FEW = 8  # peers: of more than these there are others to step in, and it must take less longer
FEW_CLUSTERS = 8  # at one scale: more have no stage each, but teams


@dataclass(frozen=True, eq=False)
class StageLayout:
    """The stages that the model is cut into, and of N peers the stage of each; nothing for those that are to stand by."""

    stages: Sequence[Span]
    places: Sequence[Span]

    @property
    def least_holders(self) -> int:
        """Of the stage that has fewest."""
        return min(self.places.count(stage) for stage in self.stages)

    @property
    def lacks_holders(self) -> float:
        """The share of the stages' further holders that are missing."""
        missing = sum(max(0, HOLDERS - self.places.count(stage)) for stage in self.stages)
        return min(1.0, missing / len(self.stages))

    @property
    def holding(self) -> int:
        """How many peers have a stage."""
        return sum(place.units > 0 for place in self.places)

    @property
    def mean_holders(self) -> float:
        """Of a unit."""
        return sum(place.units for place in self.places) / self.stages[-1].end

    def windows(self, capacity: int) -> list[Span]:
        """Whole stages; of those that are too long for a peer's memory all parts that it can hold."""
        return _parts(self.stages, capacity)


@dataclass(frozen=True)
class LikelyLayout:
    """One that comes into question. `step_s`: of its step, the longer for what is fragile, for who is left out, and by what another
    one than the estimate's best has to be better."""

    step_s: float
    layout: StageLayout


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
    """The first of the likely ones."""
    return likely_layouts(forecast, capacity_units)[0].layout


def likely_layouts(forecast: StepForecast, capacity_units: Sequence[int]) -> Sequence[LikelyLayout]:
    """Layouts with which fewest places are missing, one at least, the one first with which a step takes least. An estimate that
    knows nothing of who holds what says which layouts come into question; the best of them is first, unless with another one the
    step is forecast to be shorter, and clearly so where units have fewer holders."""
    capacity_N = np.array(capacity_units)
    candidates = sorted(_candidates(forecast, capacity_N), key=lambda one: (one.missing, one.estimate_s))
    likely = [one for one in candidates[:SHORTLIST] if one.missing == candidates[0].missing]
    if not likely:
        return [LikelyLayout(math.inf, _along(forecast, cut(forecast.unit_s(1), 1), []))]
    laid = [_laid(forecast, one, capacity_N) for one in likely]
    usual = min(laid[0], key=partial(_weighed_s, forecast.arranged_s))
    if not candidates[0].missing:
        laid.append(list(_stage_each(forecast, capacity_N)))
    others = {tuple(layout.places): layout for layouts in laid for layout in layouts if layout.places != usual.places}
    margins = {usual: 1.0} | {layout: _margin(layout, usual) for layout in others.values()}
    return _ranked(forecast, margins)


def _ranked(forecast: StepForecast, margins: Mapping[StageLayout, float]) -> Sequence[LikelyLayout]:
    """Layouts by their steps, those that are best by an arrangement's forecast by a dry run; each longer by its margin."""
    arranged = [LikelyLayout(margin * _weighed_s(forecast.arranged_s, one), one) for one, margin in margins.items()]
    arranged.sort(key=lambda one: one.step_s)
    near = [one for one in arranged[:DRY_RUNS] if one.step_s <= WITHIN * arranged[0].step_s]
    ran = [replace(one, step_s=margins[one.layout] * _weighed_s(forecast.dry_run_s, one.layout)) for one in near]
    best_s = min(one.step_s for one in ran)
    later = [replace(one, step_s=max(best_s, one.step_s)) for one in arranged[len(near) :]]
    return sorted([*ran, *later], key=lambda one: one.step_s)


def _weighed_s(step_s: Callable[[Sequence[Span]], float], layout: StageLayout) -> float:
    """Of a step, the longer for what is fragile, and for who is left out."""
    return _cost(layout) * (NOTICED_S + step_s(layout.places))


def _margin(layout: StageLayout, usual: StageLayout) -> float:
    """How many times as long a step must take with the usual layout, before this one is taken."""
    return SLIGHTLY if layout.mean_holders >= (1 - SAME) * min(HOLDERS, usual.mean_holders) else CLEARLY


@dataclass(frozen=True, eq=False)
class _Candidate:
    """Stages, and the peers that are able to hold one."""

    stages: Sequence[Span]
    able: Indexes
    missing: int  # places
    estimate_s: float


def _left_out_cost(used: int, peers: int) -> float:
    """How many times as long a step must take with all, before the others are left out."""
    return 1 + (LEFT_OUT - 1) * (1 - used / peers) * min(1.0, FEW / peers)


def _candidates(forecast: StepForecast, capacity_N: Indexes) -> Iterator[_Candidate]:
    groups = list(_groups(forecast))
    for count in range(1, forecast.load.units + 1):
        stages = cut(forecast.unit_s(count), count)
        roomy_N = capacity_N >= max(stage.units for stage in stages)
        for group in groups:
            able = group[roomy_N[group]]
            if len(able):
                fragile = fragility(min(1.0, max(0, HOLDERS * count - len(able)) / count))
                cost = fragile * _left_out_cost(len(group), forecast.network.peers)
                estimate_s = cost * (NOTICED_S + _estimate_s(forecast, stages, able))
                yield _Candidate(stages, able, max(0, count - len(able)), estimate_s)


def _groups(forecast: StepForecast) -> Iterator[Indexes]:
    """Peers among whom training may stay, along the clusters: all, and at every scale each cluster, and all who are not alone."""
    members_KN, _ = forecast.clusters.members()
    order_N = np.array(forecast.clusters.order)
    everybody = np.ones((1, forecast.network.peers))
    together_LN = (forecast.clusters.sizes(np.arange(forecast.network.peers)) > 1).astype(float)
    for member_N in np.unique(np.concatenate([everybody, members_KN, together_LN]), axis=0):
        yield order_N[member_N[order_N] > 0]


def _laid(forecast: StepForecast, one: _Candidate, capacity_N: Indexes) -> Sequence[StageLayout]:
    """The ways to lay so many stages: whole pipelines in each cluster; whole stages, where gradients weigh more than what pipelines
    hand on; or a stage for each of the fastest teams."""
    able, count = one.able.tolist(), len(one.stages)
    pipelines = _along(forecast, one.stages, able)
    whole_stages = (
        _across(forecast, one.stages, able, numbers) for numbers in _stage_numbers(forecast, one.stages, one.able)
    )
    layouts = [pipelines, *(one for one in whole_stages if one.least_holders >= min(HOLDERS, pipelines.least_holders))]
    for holders in _team_sizes(forecast, one.able, count):
        teams = _teams(forecast, one.able, holders, count)
        layouts += [layout for each in teams if (layout := _by_team(forecast, each, count, capacity_N))]
    return layouts


def _cost(layout: StageLayout) -> float:
    """How many times as long a step may take with everybody, and two holders for each unit."""
    return fragility(layout.lacks_holders) * _left_out_cost(layout.holding, len(layout.places))


def _stage_each(forecast: StepForecast, capacity_N: Indexes) -> Iterator[StageLayout]:
    """A stage for each of so many clusters, where few are large: of those side by side the ones that the fastest paths join. Groups
    of peers know only who is in one larger cluster; these need not be."""
    order_N = np.array(forecast.clusters.order)
    for label_N in forecast.clusters.label_LN[:, order_N]:
        large = [order_N[label_N == label] for label in dict.fromkeys(label_N.tolist())]
        large = [members for members in large if len(members) >= HOLDERS]
        if len(large) > FEW_CLUSTERS:
            continue
        for count in range(2, len(large) + 1):
            rows = [large[first : first + count] for first in range(len(large) - count + 1)]
            layout = _by_team(forecast, min(rows, key=partial(_apart_s, forecast)), count, capacity_N)
            if layout is not None:
                yield layout


def _apart_s(forecast: StepForecast, row: Sequence[Indexes]) -> float:
    """What a byte takes at least between the two neighbours that are farthest apart."""
    return max(float(forecast.path_NN[np.ix_(one, other)].min()) for one, other in pairwise(row))


def _team_sizes(forecast: StepForecast, able: Indexes, count: int) -> list[int]:
    """How many may hold each of so many stages: two, as many as there are, or as are in a cluster."""
    clusters = {int(size) for size in forecast.clusters.sizes(able).flat if size > HOLDERS}
    return sorted(size for size in {HOLDERS, len(able) // count, *clusters} if 0 < size * count <= len(able))


def _teams(forecast: StepForecast, able: Indexes, holders: int, count: int) -> tuple[list[Indexes], list[Indexes]]:
    """Peers in teams of so many, each of one cluster, where these are large enough for so many teams: of those about as fast, so
    that no card is waited for; or each of a fast one and slow ones, so that no team's stage is much longer than another's."""
    levels = forecast.clusters.label_LN[:, able]
    for labels in [*levels, np.zeros(len(able), int)]:
        clusters = [able[labels == label] for label in dict.fromkeys(labels.tolist())]
        if sum(len(members) // holders for members in clusters) >= count:
            break
    alike, mixed = list[Indexes](), list[Indexes]()
    for members in clusters:
        fastest = members[np.argsort(-forecast.network.work_per_s_N[members], kind="stable")]
        dealt = fastest[: len(members) // holders * holders]
        alike += list(dealt.reshape(-1, holders))
        turns = dealt.reshape(holders, -1).copy()
        turns[1::2] = turns[1::2, ::-1]
        mixed += list(turns.T)
    return alike, mixed


def _by_team(forecast: StepForecast, teams: Sequence[Indexes], count: int, capacity_N: Indexes) -> StageLayout | None:
    """The fastest of the teams, in their order, each with a stage as long as it is fast; None where that does not fit into their
    memory. Who is over stands by."""
    rates = np.array([forecast.network.work_per_s_N[team].sum() for team in teams])
    chosen = np.sort(np.argsort(-rates, kind="stable")[:count])
    stages = _in_proportion(forecast.load.work_U, rates[chosen])
    places = [STANDING_BY] * forecast.network.peers
    for stage, number in zip(stages, chosen, strict=True):
        if not 0 < stage.units <= capacity_N[teams[number]].min():
            return None
        for peer in teams[number]:
            places[peer] = stage
    return StageLayout(stages, places)


def _in_proportion(work_U: Floats, rate_S: Floats) -> list[Span]:
    """The units cut into stages with work as their holders are fast."""
    middle_U = (work_U.cumsum() - work_U / 2) / work_U.sum()
    ends = np.searchsorted(middle_U, rate_S.cumsum()[:-1] / rate_S.sum()).tolist()
    return [Span(*pair) for pair in pairwise([0, *ends, len(work_U)])]


def _across(
    forecast: StepForecast, stages: Sequence[Span], along: Sequence[int], numbers: Sequence[int] | Indexes
) -> StageLayout:
    """Whole stages in clusters: to each peer along them the one of its number."""
    places = [STANDING_BY] * forecast.network.peers
    for peer, number in zip(along, numbers, strict=True):
        places[peer] = stages[number]
    return StageLayout(stages, places)


def _stage_numbers(forecast: StepForecast, stages: Sequence[Span], along: Indexes) -> list[Indexes]:
    """Each peer's stage with whole stages in clusters, laid from their one end and from the other: of five peers and four two
    stages get as many, of four and five each gets one from the other cluster. Once, where the same peers are replicas of each
    other then: which end comes first should not hang on what somebody measured."""
    there, back = _whole_stages(forecast, stages, along), _whole_stages(forecast, stages, along[::-1])[::-1]
    alike = np.array_equal(there[:, None] == there, back[:, None] == back)
    return [there] if alike else [there, back]


def _whole_stages(forecast: StepForecast, stages: Sequence[Span], along: Indexes) -> Indexes:
    """The number of each peer's stage: stage after stage, each to who comes next along the clusters, until it is as fast as it
    should be."""
    work_per_s = forecast.network.work_per_s_N[along]
    middle_C = (work_per_s.cumsum() - work_per_s / 2) / work_per_s.sum()
    ends_S = np.array([stage.end for stage in stages]) / forecast.load.units
    number_C: Indexes = np.searchsorted(ends_S, middle_C)
    return number_C


def _along(forecast: StepForecast, stages: Sequence[Span], along: Sequence[int]) -> StageLayout:
    """Along the clusters each to the stage that is slowest so far: stage after stage where all are as fast, so that pipelines
    cross as few slow links as they can. The last ones go where there is no second holder yet."""
    places = [STANDING_BY] * forecast.network.peers
    rate_S, lacking_S = np.zeros(len(stages)), np.full(len(stages), HOLDERS)
    for number, peer in enumerate(along):
        is_due = lacking_S.clip(min=0).sum() >= len(along) - number
        open_S = np.where(lacking_S > 0, rate_S, np.inf) if is_due else rate_S
        slowest = int((open_S <= (1 + SAME) * open_S.min()).argmax())
        places[peer] = stages[slowest]
        rate_S[slowest] += forecast.network.work_per_s_N[peer] / stages[slowest].units
        lacking_S[slowest] -= 1
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
    """A step of those who can hold a stage, laid in the better of two ways: pipelines stay in clusters as far as these are large
    enough, replicas are all over the network; or stage after stage along the clusters. Fewer peers than stages take as many times
    longer."""
    stages, labels_LN = len(cut_out), forecast.clusters.label_LN[:, able]
    everybody_NN = np.ones((len(able), len(able)), dtype=bool)
    leaving_LC = np.ceil(stages / forecast.clusters.sizes(able)) - 1  # hops of a pipeline that leave a cluster
    compute_s = forecast.load.microbatches * _busiest_s(forecast, cut_out, able)
    pipelines_s = _between_s(forecast, cut_out, able, leaving_LC, everybody_NN)
    parted_L1 = np.minimum(stages, (np.diff(labels_LN, axis=1) != 0).sum(axis=1, keepdims=True) + 1) - 1
    whole_stages_s = (
        _between_s(forecast, cut_out, able, parted_L1, stage_N[:, None] == stage_N)
        for stage_N in _stage_numbers(forecast, cut_out, able)
    )
    return (compute_s + min(pipelines_s, *whole_stages_s)) * max(1.0, stages / len(able))


def _between_s(
    forecast: StepForecast, cut_out: Sequence[Span], able: Indexes, leaving_LX: Floats, are_replicas_NN: Bools
) -> float:
    """What a step takes beside computing, with pipelines so many of whose hops leave clusters of each level, and these who may be
    replicas of each other."""
    load, network, stages = forecast.load, forecast.network, len(cut_out)
    replicas = max(1.0, len(able) / stages)
    hops_s = float((forecast.clusters.rise_L[:, None] * leaving_LX).sum(axis=0).mean())
    line_s = 2 * load.microbatches * hops_s / max(1, stages - 1) / replicas
    gradient_bytes = 2 * max(float(load.gradient_bytes_U[slice(*stage)].sum()) for stage in cut_out)
    pairs = np.ix_(able, able)
    averaging_s = gradient_bytes * (1 - 1 / replicas) * float(forecast.line_N[able].max())
    if replicas > 1:
        averaging_s += gradient_bytes / replicas * float(forecast.path_NN[pairs][are_replicas_NN].max())
        averaging_s += 2 * float(network.delay_NN[pairs][are_replicas_NN].max())
    return line_s + 2 * hops_s + forecast.latency_s + averaging_s


def _busiest_s(forecast: StepForecast, cut_out: Sequence[Span], able: Indexes) -> float:
    """What a microbatch takes the slowest stage. Cards that are alike are dealt out whole, each to the stage that is slowest so
    far: of eight, three stages get three, three and two. Others, of which stages may be made about as fast, count by their sum,
    and so do those that are too few."""
    work_S = [float(forecast.load.work_U[slice(*stage)].sum()) for stage in cut_out]
    speeds: list[float] = forecast.network.work_per_s_N[able].tolist()
    if len(speeds) < len(work_S) or max(speeds) > ALIKE * min(speeds):
        return sum(work_S) / sum(speeds)
    stages = [(0.0, number) for number in range(len(work_S))]  # work/s of a stage for each unit of its work
    for speed in speeds:
        rate, number = stages[0]
        heapq.heapreplace(stages, (rate + speed / work_S[number], number))
    return 1 / stages[0][0]
