"""Layout of stages: the same result at every peer that sees the same peers, without a central planner.

For each cluster of the network, and each possible number of stages, stages are laid out. The steps of these layouts are
sketched, and those of the best are simulated (`step_forecast.py`). In the best layout every peer finds its own place; peers
outside the cluster stand by.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, pairwise

import numpy as np

from swarmnode.plan.cost import HOLDERS, fragility
from swarmnode.plan.spans.flow import Floats, Indexes
from swarmnode.plan.training.step_forecast import StepForecast, held_units
from swarmnode.plan.training.wiring import SAME
from swarmnode.plan.view import Span

STANDING_BY = Span(0, 0)
CLEARLY = 1.2  # times as long a step must take before a layout with fewer holders per unit is taken: it survives losses less well
SLIGHTLY = 1.05  # likewise, for as many holders: peers with slightly different views come to the same layout
PLAYED = 32  # the most layouts whose step is simulated
NEAR = 1.75  # times the best sketch: sketches are that far off
FEWEST = 40  # shapes that are laid out in any case
WITHIN = 1.25  # times the best sketch: further shapes are laid out if they may take less
LEFT_OUT = (
    1.2  # times as long a step must take with all, before most of a few peers are left out: they may be needed later
)
NOTICED_S = 1.0  # added to a step, so that differences of less hardly leave a peer out, or a stage with one holder
FEW = 8  # peers: among more, others can step in, and a smaller gain suffices to leave some out
FEW_CLUSTERS = 8  # at one scale: more have no stage each, but teams


@dataclass(frozen=True, eq=False)
class StageLayout:
    """Layout of a training: the `stages` that the model is cut into, and `places`, the stage of each of N peers. The place of a
    peer that stands by is an empty span."""

    stages: Sequence[Span]
    places: Sequence[Span]

    @property
    def least_holders(self) -> int:
        """Number of peers that hold the stage with the fewest holders."""
        return min(self.places.count(stage) for stage in self.stages)

    @property
    def holding(self) -> int:
        """Number of peers that hold layers in this layout; the others stand by."""
        return sum(place.units > 0 for place in self.places)

    @property
    def mean_holders(self) -> float:
        """Mean number of holders of a layer."""
        return sum(place.units for place in self.places) / self.stages[-1].end

    def windows(self, capacity: int) -> list[Span]:
        """Return the whole stages, and for each stage longer than `capacity` layers every part of `capacity` layers (at least
        1)."""
        return _parts(self.stages, capacity)


@dataclass(frozen=True)
class LikelyLayout:
    """A candidate layout. `step_s`: the seconds of its step, raised for layers with few holders, for peers left out, and by
    the margin over the layout with the best sketch."""

    step_s: float
    layout: StageLayout


def windows_between(spans: Sequence[Span], units: int, capacity: int) -> list[Span]:
    """Return the spans of at most `capacity` layers that begin and end at edges of `spans` or of the model. If two
    neighbouring edges are farther apart, all parts of `capacity` layers (at least 1) between them are returned, too."""
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


def likely_layouts(forecast: StepForecast, capacity_units: Sequence[int]) -> Sequence[LikelyLayout]:
    """Return the layouts with fewest missing places, at least one, that with the shortest step first. Sketches of steps
    select the candidates, then steps are simulated. The best sketch stays first unless the simulated step of another layout
    is shorter, and clearly shorter if that layout has fewer holders per layer."""
    sketched = _sketched(forecast, np.array(capacity_units))
    if not sketched:
        return [LikelyLayout(math.inf, _along(forecast, cut(forecast.unit_s(1), 1), []))]
    usual = sketched[0].layout
    weighed = [replace(one, step_s=_margin(one.layout, usual) * one.step_s) for one in sketched]
    near = sum(one.step_s <= NEAR * sketched[0].step_s for one in sketched[:PLAYED])
    played = [
        replace(one, step_s=_margin(one.layout, usual) * _weighed_s(forecast.step_s(one.layout.places), one.layout))
        for one in weighed[:near]
    ]
    best_s = min(one.step_s for one in played)
    later = [replace(one, step_s=max(best_s, one.step_s)) for one in weighed[near:]]
    return sorted([*played, *later], key=lambda one: float(f"{one.step_s:.6g}"))  # of equal ones the better sketched


def _sketched(forecast: StepForecast, capacity_N: Indexes) -> Sequence[LikelyLayout]:
    """Return the layouts with fewest missing places, the shortest sketched step first; empty if no peer can hold a stage.
    Shapes are tried in the order of their least possible step until no other one can come near the best."""
    shapes = sorted(_shapes(forecast, capacity_N), key=lambda one: (one.missing, one.least_s))
    found, best_s = dict[tuple[Span, ...], LikelyLayout](), math.inf
    for number, shape in enumerate(shapes):
        if shape.missing > shapes[0].missing or (number >= FEWEST and shape.least_s > WITHIN * best_s):
            break
        found.update(_sketch(forecast, _laid(forecast, shape, capacity_N)))
        best_s = min(one.step_s for one in found.values())
    if shapes and not shapes[0].missing:
        found.update(_sketch(forecast, list(_stage_each(forecast, capacity_N))))
    return sorted(found.values(), key=lambda one: one.step_s)


def _sketch(forecast: StepForecast, layouts: Sequence[StageLayout]) -> dict[tuple[Span, ...], LikelyLayout]:
    """Return `layouts` by their places, each with the quickly estimated seconds of its step."""
    if not layouts:
        return {}
    held_LNU = np.stack([held_units(layout.places, forecast.load.units) for layout in layouts])
    return {
        tuple(layout.places): LikelyLayout(_weighed_s(step_s, layout), layout)
        for layout, step_s in zip(layouts, forecast.sketch_s(held_LNU).tolist(), strict=True)
    }


def _weighed_s(step_s: float, layout: StageLayout) -> float:
    """Return the seconds of a step, raised for stages with few holders and for peers left out."""
    # missing holders, up to `HOLDERS` for each stage, per stage
    missing = sum(max(0, HOLDERS - layout.places.count(stage)) for stage in layout.stages)
    left_out = _left_out_cost(layout.holding, len(layout.places))
    return fragility(min(1.0, missing / len(layout.stages))) * left_out * (NOTICED_S + step_s)


def _margin(layout: StageLayout, usual: StageLayout) -> float:
    """Return how many times as long a step must take with the usual layout before `layout` replaces it."""
    return SLIGHTLY if layout.mean_holders >= (1 - SAME) * min(HOLDERS, usual.mean_holders) else CLEARLY


@dataclass(frozen=True, eq=False)
class _Shape:
    """Stages, and the peers with room for any of them. `missing`: stages without a peer; `least_s`: the least possible
    seconds of a step, with all peers equally busy and no other costs, raised as in `_weighed_s`."""

    stages: Sequence[Span]
    able: Indexes
    missing: int
    least_s: float


def _left_out_cost(used: int, peers: int) -> float:
    """Return how many times as long a step must take with all `peers` before all but `used` of them are left out."""
    return 1 + (LEFT_OUT - 1) * (1 - used / peers) * min(1.0, FEW / peers)


def _shapes(forecast: StepForecast, capacity_N: Indexes) -> Iterator[_Shape]:
    groups = list(_groups(forecast))
    load, peers = forecast.load, forecast.network.peers
    for count in range(1, load.units + 1):
        stages = cut(forecast.unit_s(count), count)
        roomy_N = capacity_N >= max(stage.units for stage in stages)
        for group in groups:
            able = group[roomy_N[group]]
            if len(able):
                compute_s = load.microbatches * load.work_U.sum() / forecast.network.work_per_s_N[able].sum()
                fragile = fragility(min(1.0, max(0, HOLDERS * count - len(able)) / count))
                least_s = fragile * _left_out_cost(len(able), peers) * (NOTICED_S + forecast.latency_s + compute_s)
                yield _Shape(stages, able, max(0, count - len(able)), float(least_s))


def _groups(forecast: StepForecast) -> Iterator[Indexes]:
    """Yield groups of peers for a training: all, each cluster of every scale, and for every scale all peers that are not
    alone."""
    members_KN, _ = forecast.clusters.members()
    order_N = np.array(forecast.clusters.order)
    everybody = np.ones((1, forecast.network.peers))
    together_LN = (forecast.clusters.sizes(np.arange(forecast.network.peers)) > 1).astype(float)
    for member_N in np.unique(np.concatenate([everybody, members_KN, together_LN]), axis=0):
        yield order_N[member_N[order_N] > 0]


def _laid(forecast: StepForecast, shape: _Shape, capacity_N: Indexes) -> Sequence[StageLayout]:
    """Return the layouts of one shape: whole pipelines in each cluster; whole stages in clusters, for gradients that weigh
    more than activations; and a stage for each of the fastest teams."""
    able, count = shape.able.tolist(), len(shape.stages)
    pipelines = _along(forecast, shape.stages, able)
    whole_stages = (
        _across(forecast, shape.stages, able, numbers) for numbers in _stage_numbers(forecast, shape.stages, shape.able)
    )
    layouts = [
        pipelines,
        *(shape for shape in whole_stages if shape.least_holders >= min(HOLDERS, pipelines.least_holders)),
    ]
    clusters = {int(size) for size in forecast.clusters.sizes(shape.able).flat if size > HOLDERS}
    sizes = {HOLDERS, len(shape.able) // count, *clusters}
    for holders in sorted(size for size in sizes if 0 < size * count <= len(shape.able)):
        teams = _teams(forecast, shape.able, holders, count)
        layouts += [layout for each in teams if (layout := _by_team(forecast, each, count, capacity_N))]
    return layouts


def _stage_each(forecast: StepForecast, capacity_N: Indexes) -> Iterator[StageLayout]:
    """Yield layouts with a stage for each of several clusters, at scales with at most `FEW_CLUSTERS` large ones. Of
    neighbouring clusters those with the fastest paths between them are chosen. `_groups` has only peers of one larger
    cluster; these need not be in one."""
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
    """Return the seconds per byte on the fastest path between the two neighbours of `row` that are farthest apart."""
    return max(float(forecast.path_NN[np.ix_(one, other)].min()) for one, other in pairwise(row))


def _teams(forecast: StepForecast, able: Indexes, holders: int, count: int) -> tuple[list[Indexes], list[Indexes]]:
    """Return two lists of teams of `holders` peers, each team within one cluster if the clusters allow `count` teams. In the
    first list the peers of a team are about equally fast, so that no card is waited for. In the second fast and slow peers
    are mixed, so that no team's stage is much longer than another's."""
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
    """Return the layout with a stage for each of the `count` fastest teams, in their order, in proportion to their speed;
    the other peers stand by. None if a stage is empty or does not fit into the memory of its team."""
    rates = np.array([forecast.network.work_per_s_N[team].sum() for team in teams])
    chosen = np.sort(np.argsort(-rates, kind="stable")[:count])
    # stages whose work is proportional to the speed of their holders
    rate_S, work_U = rates[chosen], forecast.load.work_U
    middle_U = (work_U.cumsum() - work_U / 2) / work_U.sum()
    ends = np.searchsorted(middle_U, rate_S.cumsum()[:-1] / rate_S.sum()).tolist()
    stages = [Span(*pair) for pair in pairwise([0, *ends, len(work_U)])]
    places = [STANDING_BY] * forecast.network.peers
    for stage, number in zip(stages, chosen, strict=True):
        if not 0 < stage.units <= capacity_N[teams[number]].min():
            return None
        for peer in teams[number]:
            places[peer] = stage
    return StageLayout(stages, places)


def _across(
    forecast: StepForecast, stages: Sequence[Span], along: Sequence[int], numbers: Sequence[int] | Indexes
) -> StageLayout:
    """Return the layout that gives each peer of `along` the stage of its number in `numbers`; the other peers stand by."""
    places = [STANDING_BY] * forecast.network.peers
    for peer, number in zip(along, numbers, strict=True):
        places[peer] = stages[number]
    return StageLayout(stages, places)


def _stage_numbers(forecast: StepForecast, stages: Sequence[Span], along: Indexes) -> list[Indexes]:
    """Return each peer's stage number with whole stages in clusters, laid from one end of `along` and from the other. Only
    one result is returned if both have the same replicas, so that noise of measurements does not decide which end comes
    first."""
    there, back = _whole_stages(forecast, stages, along), _whole_stages(forecast, stages, along[::-1])[::-1]
    alike = np.array_equal(there[:, None] == there, back[:, None] == back)
    return [there] if alike else [there, back]


def _whole_stages(forecast: StepForecast, stages: Sequence[Span], along: Indexes) -> Indexes:
    """Return the stage number of each peer, for peers in the order `along`. Stages are filled one after another, each until its
    share of the peers' speed matches its share of the layers."""
    work_per_s = forecast.network.work_per_s_N[along]
    middle_C = (work_per_s.cumsum() - work_per_s / 2) / work_per_s.sum()
    ends_S = np.array([stage.end for stage in stages]) / forecast.load.units
    number_C: Indexes = np.searchsorted(ends_S, middle_C)
    return number_C


def _along(forecast: StepForecast, stages: Sequence[Span], along: Sequence[int]) -> StageLayout:
    """Return the layout that gives each peer of `along` the slowest stage at its turn, so that pipelines cross few slow
    links. If only as many peers are left as holders are missing, each gets a stage with fewer than `HOLDERS`."""
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
    """Return the layers cut into `count` stages of about equal seconds (least sum of squares), each of at least one layer."""
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
