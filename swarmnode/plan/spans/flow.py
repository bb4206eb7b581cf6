"""Throughput of a placement as a maximum flow, and its fair share for each layer.

Every token passes every layer once. A peer computes `v` layer passes a second and may spend them on any layers of its span,
so what flows is work: from peers, along "holds", to layers that each need the same amount. By max-flow = min-cut the
throughput is bounded by every set I of layers: all peers that hold any of I must do the work of all of I,

    throughput <= v(holders of I) / |I|,        and the smallest such ratio is reached.

Spans are intervals, so the cheapest cut is found by a shortest path: where i < j are consecutive members of I, choosing j
adds the peers whose span begins after i and contains j, `first[i, j]`, whatever came before i. The ratio is minimised by
Dinkelbach's iteration (1967); cutting the tightest set away and asking again gives the fair (leximin) share of every layer.

Everything works on a batch of placements at once: the leading axis B of each array. Speeds are in layers/s.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Indexes = npt.NDArray[np.intp]
Bools = npt.NDArray[np.bool_]

SLACK = 1e-9  # relative: what rounding may make of two equal flows
SHARPNESS = 30  # of the power mean: close to the minimum, yet two equal bottlenecks count more than one


def supply_of(units: int, spans: Iterable[tuple[int, int, float]]) -> Floats:
    """Sum the speeds of `spans`, given as (start, end, layers/s), by span. Returns `supply_SE` of shape layers x (layers + 1)."""
    supply_SE = np.zeros((units, units + 1))
    for start, end, units_per_s in spans:
        supply_SE[start, end] += units_per_s
    return supply_SE


def throughput(supply_SE: Floats) -> float:
    """Return the tokens/s of a placement; 0 if a layer has no holder."""
    return float(_tightest(supply_SE[None], np.ones((1, len(supply_SE)), bool))[0][0])


def fair_levels(supply_BSE: Floats, rounds: int | None = None) -> Floats:
    """Return `level_BU`, the tokens/s of each layer if no layer had to wait for another; the least is the throughput.

    The levels are the fairest division of the peers' work. After `rounds` rounds all remaining layers share the last level.
    """
    supply_BSE = supply_BSE.copy()
    batch, units = supply_BSE.shape[:2]
    level_BU = np.zeros((batch, units))
    open_BU = np.ones((batch, units), bool)
    left = units if rounds is None else rounds
    while left > 0 and open_BU.any():
        left -= 1
        level_B, tight_BU = _tightest(supply_BSE, open_BU)
        closing_BU = tight_BU if left else open_BU
        level_BU[closing_BU] = np.broadcast_to(level_B[:, None], level_BU.shape)[closing_BU]
        open_BU = open_BU & ~closing_BU
        # the work of all peers that hold a layer of the tightest set is used up: their speed in [B, start, end] becomes 0
        before_BU = np.zeros((batch, units + 1), np.intp)
        before_BU[:, 1:] = np.cumsum(tight_BU, axis=1)
        supply_BSE[before_BU[:, None, :] > before_BU[:, :units, None]] = 0.0
    return level_BU


def worth(level_BU: Floats) -> Floats:
    """Return `worth_B`, a figure in tokens/s for each placement: nearly its least level, yet every level counts.

    The throughput alone has plateaus: of two equal bottlenecks a move can widen only one, and gains nothing. A power mean
    with a large negative exponent sees that one of them is gone.
    """
    least_B1 = level_BU.min(axis=-1, keepdims=True)
    safe_B1 = np.where(least_B1 > 0, least_B1, 1.0)
    ratio_BU = np.maximum(level_BU / safe_B1, 1.0)
    mean_B = (ratio_BU**-SHARPNESS).mean(axis=-1) ** (-1 / SHARPNESS)
    worth_B: Floats = least_B1[..., 0] * mean_B
    return worth_B


def bound(units: int, peers: Iterable[tuple[int, float]]) -> float:
    """Return an upper bound, in tokens/s, of any placement of `peers`, given as (capacity in layers, layers/s); 0 if they cannot
    hold all `units` layers.

    At T tokens/s a peer does at most min(v, T x capacity) layer passes a second, and all layers together need T x layers.
    """
    able = [(min(capacity, units), speed) for capacity, speed in peers if capacity > 0 and speed > 0]
    able.sort(key=lambda peer: peer[1] / peer[0])  # the slowest for their memory are the first to be busy all the time
    busy_units_per_s, room_units = 0.0, sum(capacity for capacity, _ in able)
    for index, (capacity, units_per_s) in enumerate(able):
        busy_units_per_s, room_units = busy_units_per_s + units_per_s, room_units - capacity
        if room_units < units:
            level = busy_units_per_s / (units - room_units)
            if index + 1 == len(able) or level * able[index + 1][0] <= able[index + 1][1]:
                return level if room_units + sum(c for c, _ in able[: index + 1]) >= units else 0.0
    return 0.0


def _first(supply_BSE: Floats) -> Floats:
    """Return first_BIJ, the layers/s of the peers that hold layer j and begin after layer i - 1; infinite if j < i.

    `supply_BSE` has the layers/s of the peers whose layers are [S, E), for each of B variants.

    Row i stands for the previous member i - 1 of a set, row 0 for none.
    """
    batch, units = supply_BSE.shape[:2]
    beyond_BSJ = np.flip(np.cumsum(np.flip(supply_BSE, -1), axis=-1), -1)[..., 1:]  # [s, j]: of start s, end after j
    sums_BSJ = np.cumsum(beyond_BSJ, axis=1)
    holders_BJ = np.diagonal(sums_BSJ, axis1=1, axis2=2)
    first_BIJ = np.empty((batch, units + 1, units))
    first_BIJ[:, 0] = holders_BJ
    first_BIJ[:, 1:] = holders_BJ[:, None, :] - sums_BSJ
    backwards_IJ = np.arange(units)[None, :] < np.arange(units + 1)[:, None]
    return np.where(backwards_IJ, np.inf, np.maximum(first_BIJ, 0.0))


def _tightest(supply_BSE: Floats, open_BU: Bools) -> tuple[Floats, Bools]:
    """Return the least ratio of layers/s to size over all sets of open layers, and the largest set that has this ratio."""
    first_BIJ = np.where(open_BU[:, None, :], _first(supply_BSE), np.inf)
    level_B = first_BIJ[:, 0].min(axis=1)  # of single units: an upper bound
    level_B[~np.isfinite(level_B)] = 0.0  # nothing is open there
    while True:
        cost_B, size_B, _ = _cheapest(first_BIJ, level_B)
        lower = (cost_B < -SLACK * level_B * np.maximum(size_B, 1)) & (size_B > 0)
        if not lower.any():
            break
        level_B = np.where(lower, np.maximum(level_B + cost_B / np.maximum(size_B, 1), 0.0), level_B)
    generous_B = level_B * (1 + 4 * SLACK) + SLACK * SLACK  # now every set of this ratio is worth having
    return level_B, _cheapest(first_BIJ, generous_B)[2] & open_BU


def _cheapest(first_BIJ: Floats, level_B: Floats) -> tuple[Floats, Indexes, Bools]:
    """Find the set of layers with the least cost, its holders' layers/s minus `level_B` times its size. Returns its cost, its
    size and its members."""
    batch, _, units = first_BIJ.shape
    rows = np.arange(batch)
    cost_BI = np.full((batch, units + 1), np.inf)
    cost_BI[:, 0] = 0.0
    size_BI = np.zeros((batch, units + 1), np.intp)
    before_BI = np.zeros((batch, units + 1), np.intp)
    for unit in range(units):
        step_BI = cost_BI[:, : unit + 1] + first_BIJ[:, : unit + 1, unit]
        before_B = step_BI.argmin(axis=1)
        cost_BI[:, unit + 1] = step_BI[rows, before_B] - level_B
        size_BI[:, unit + 1] = size_BI[rows, before_B] + 1
        before_BI[:, unit + 1] = before_B
    last_B = cost_BI[:, 1:].argmin(axis=1) + 1
    members_BU = np.zeros((batch, units + 1), bool)
    at_B = last_B
    while at_B.any():
        members_BU[rows, at_B] = True
        at_B = before_BI[rows, at_B]
    return cost_BI[rows, last_B], size_BI[rows, last_B], members_BU[:, 1:]
