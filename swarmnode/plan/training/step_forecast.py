"""What a training step will take, from who holds what: one figure that every peer works out for itself.

Microbatches are played through the stages (`step_model.py`), then gradients are averaged as they will be, and commands waited for.
Where hundreds of arrangements are looked through, a step is sketched in closed form instead, and the best are played: terms that
add up are the units with least speed, or the hop that has most to carry; the first microbatch's way; and the slowest replicas. What
must cross between those who hold a unit and those who hold the next follows from `Clusters`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from swarmnode.net.interfaces import PeerId
from swarmnode.plan.offline.grid import dendrogram
from swarmnode.plan.spans.flow import Floats, Indexes
from swarmnode.plan.spans.placement import REAL_CHANGE
from swarmnode.plan.training.averaging import AveragingNetwork, fastest, part_shares, sharings_of
from swarmnode.plan.training.step_model import passing_s
from swarmnode.plan.training.transfers import Transfers
from swarmnode.plan.training.wiring import Replica
from swarmnode.plan.view import Span

COMPUTE_SHARPNESS, AVERAGING_SHARPNESS = 8, 16
SHARED = 0.25  # how much of what is held beyond need is shared out, not left to whoever is nearest
SAME_DELAY_S = 0.005  # delays that differ by less are the same
LEVELS = 6  # scales of clusters that are told apart
UNHELD = 1e-3  # of a peer's speed on the whole model: what a unit that nobody holds counts as having


@dataclass(frozen=True, eq=False)
class TrainingLoad:
    """A step: its microbatches, bytes of one's values between stages, and per unit bytes of gradients, work (in any measure), and
    bytes of what is learnt. `over_clusters`: whether replicas may average so. `commands`: round trips of a coordinator's words, for
    which all wait."""

    microbatches: int
    activation_bytes: float
    gradient_bytes_U: Floats
    work_U: Floats
    state_bytes_U: Floats
    over_clusters: bool = True
    commands: int = 0

    @property
    def units(self) -> int:
        """How many units the model has."""
        return len(self.work_U)


@dataclass(frozen=True, eq=False)
class TrainingNetwork:
    """N peers: work on one microbatch per second, and what lies between each two of them. Bandwidths of 0 are not known. `homes`:
    numbers that those have in common whose paths out of their home share a line."""

    work_per_s_N: Floats
    delay_NN: Floats
    bandwidth_NN: Floats
    homes: tuple[int, ...] = ()

    @property
    def peers(self) -> int:
        """N."""
        return len(self.work_per_s_N)

    def is_as_fast(self, other: TrainingNetwork) -> bool:
        """Whether the same peers are as fast, in the two, as far as measurements tell."""
        return _are_alike(self.work_per_s_N, other.work_per_s_N)

    def is_like(self, other: TrainingNetwork) -> bool:
        """Whether the two, of the same peers, differ by no more than measurements of the same do."""
        return (
            self.homes == other.homes
            and self.is_as_fast(other)
            and _are_alike(self.delay_NN, other.delay_NN, SAME_DELAY_S)
            and _are_alike(self.bandwidth_NN, other.bandwidth_NN)
        )

    @property
    def seconds_per_byte_NN(self) -> Floats:
        """Of the slower of the two directions; nothing to oneself. Where neither is known it is the usual one of those that are: a
        peer of which nobody knows anything is no way between two places."""
        known_NN = np.where(self.bandwidth_NN > 0, self.bandwidth_NN, np.inf)
        slowest_NN = np.minimum(known_NN, known_NN.T)
        told = slowest_NN[np.isfinite(slowest_NN) & ~np.eye(self.peers, dtype=bool)]
        slower_NN: Floats = 8 / np.where(np.isfinite(slowest_NN), slowest_NN, np.median(told) if len(told) else np.inf)
        np.fill_diagonal(slower_NN, 0.0)
        return slower_NN


class Clusters:
    """Clusters of N peers at several scales: how slow a link at least has to be crossed to get from one to another. Single linkage
    turns hops into an ultrametric: two peers are as far apart as the level at which their clusters become one. By it the least
    that must cross between two sets of peers is a sum over clusters, without any matching (earth mover's distance on a tree).
    `rise_L`: seconds that a hop which leaves the clusters of a level costs more than one inside; `label_LN`: the cluster of each
    peer at each level, at the first of which everybody is alone; `order`: all peers, clusters of any level side by side."""

    def __init__(self, hop_NN: Floats) -> None:
        peers = len(hop_NN)
        tree = dendrogram(hop_NN)
        self.order = tree.order
        scales = _scales(np.unique(tree.gaps)) if peers > 1 else []
        tops = [-1.0, *(float(scale.max()) for scale in scales[:-1])]
        self.rise_L: Floats = np.diff([0.0, *(float(scale.mean()) for scale in scales)])
        self.label_LN: Indexes = np.zeros((len(scales), peers), np.intp)
        for level, top in enumerate(tops[: len(scales)]):
            for label, members in enumerate(tree.clusters(top)):
                self.label_LN[level, members] = label

    def __repr__(self) -> str:
        counts = [int(labels.max()) + 1 for labels in self.label_LN]
        return f"<Clusters {counts}, hops of {np.cumsum(self.rise_L).round(4).tolist()} s>"

    def members(self) -> tuple[Floats, Floats]:
        """All clusters of all levels: [K, N] who is in each, and [K] the seconds of its level."""
        each = [np.eye(int(labels.max()) + 1)[labels].T for labels in self.label_LN]
        if not each:
            return np.zeros((0, self.label_LN.shape[1])), np.zeros(0)
        return np.concatenate(each), np.repeat(self.rise_L, [len(one) for one in each])

    def sizes(self, chosen: Indexes) -> Floats:
        """[L, C]: how many of the chosen peers are in the cluster of each."""
        labels_LC = self.label_LN[:, chosen]
        sizes_LC: Floats = (labels_LC[:, :, None] == labels_LC[:, None, :]).sum(axis=2).astype(float)
        return sizes_LC


def _scales(heights: Floats) -> list[Floats]:
    """Heights in groups, cut where one is most times the one before."""
    steps = np.diff(np.log(np.maximum(heights, 1e-9)))
    cuts = np.sort(np.argsort(-steps, kind="stable")[: LEVELS - 1])
    return np.split(heights, cuts + 1)


class StepForecast:
    """Of one load on one network."""

    def __init__(self, load: TrainingLoad, network: TrainingNetwork) -> None:
        self.load, self.network = load, network
        self._played_s: dict[tuple[Span, ...], float] = {}
        self.path_NN = network.seconds_per_byte_NN
        apart_NN = self.path_NN + np.where(np.eye(network.peers, dtype=bool), np.inf, 0.0)
        self.line_N = np.where(np.isfinite(apart_NN.min(axis=1)), apart_NN.min(axis=1), 0.0)  # its fastest path
        self._delay_NN = np.maximum(network.delay_NN, network.delay_NN.T) * (1 - np.eye(network.peers))
        self.clusters = Clusters(load.activation_bytes * self.path_NN + self._delay_NN)
        with np.errstate(divide="ignore"):
            self._averaging = AveragingNetwork(8 / self.path_NN, 8 / self.line_N, self._delay_NN, network.homes)
        self._members_KN, self._rise_K = self.clusters.members()
        self.latency_s = float(load.work_U.sum() / network.work_per_s_N.mean())

    def __repr__(self) -> str:
        return f"<StepForecast of {self.load.units} units on {self.network.peers} peers, {self.clusters!r}>"

    def unit_s(self, stages: int) -> Floats:
        """[U]: what a unit adds to the time of its stage, one of so many: its computing, and its gradients on a line."""
        compute_U = stages * self.load.microbatches * self.load.work_U / self.network.work_per_s_N.sum()
        unit_s_U: Floats = compute_U + 2 * self.load.gradient_bytes_U * self.line_N.max() + 1e-9
        return unit_s_U

    def step_s(self, spans: Sequence[Span]) -> float:
        """Return the seconds of a step with all on their spans: its microbatches played through, gradients averaged as they will
        be, and commands waited for. Where units have no holder the passes are sketched."""
        key = tuple(spans)
        if key not in self._played_s:
            held_NU = held_units(spans, self.load.units)
            passed_s = passing_s(self.load.units, *self._stages(spans), self.load.microbatches)
            if not math.isfinite(passed_s):
                passed_s = float(self._passing_s(held_NU[None])[0])
            self._played_s[key] = passed_s + self._averaged_s(held_NU) + self._commanded_s(held_NU)
        return self._played_s[key]

    def sketch_s(self, held_LNU: Floats) -> Floats:
        """[L]: about what a step takes in each of several arrangements, in closed form: for what is looked through by hundreds, of
        which the best are played. Close to the slowest of each kind, but every part counts a little (power means): so peers that
        see no more than what one of them could do find their way."""
        return self._passing_s(held_LNU) + self._averaging_s(held_LNU)

    def fetching_s(self, spans: Sequence[Span], peer: int, window: Span) -> float:
        """Until `peer` has what is learnt of those units of `window` that are not its own yet, each from its fastest holder."""
        held_NU = held_units(spans, self.load.units)
        new_U = held_units([window], self.load.units)[0] > held_NU[peer]
        path_N1 = np.where(np.arange(len(spans)) == peer, np.inf, self.path_NN[:, peer])[:, None]
        path_U = np.where(held_NU > 0, path_N1, np.inf).min(axis=0)
        path_U = np.where(np.isfinite(path_U), path_U, self.line_N[peer])  # from a disk, where nobody holds it
        return float((self.load.state_bytes_U * path_U)[new_U].sum())

    def _stages(self, spans: Sequence[Span]) -> tuple[dict[PeerId, Replica], Transfers]:
        """Who holds something, and what lies between them."""
        chosen = [number for number, span in enumerate(spans) if span.units]
        names = [f"{number:06d}" for number in chosen]
        unit_s = [float(self.load.work_U[slice(*spans[one])].mean() / self.network.work_per_s_N[one]) for one in chosen]
        transfers, pairs = Transfers(), np.ix_(chosen, chosen)
        homes = [self.network.homes[number] for number in chosen] if self.network.homes else ()
        transfers.know(names, self._delay_NN[pairs], self.load.activation_bytes * self.path_NN[pairs], homes)
        return {name: Replica(spans[one], s) for name, one, s in zip(names, chosen, unit_s, strict=True)}, transfers

    def _averaged_s(self, held_NU: Floats) -> float:
        """Until whoever has most to average is done, or the line of a home that several share: the units that the same peers hold,
        one group after another."""
        holders_GN, group_U = np.unique(held_NU.T > 0, axis=0, return_inverse=True)
        busy_s_N, homes_s = np.zeros(len(held_NU)), Counter[int]()
        for number, holds_N in enumerate(holders_GN):
            if holds_N.sum() > 1:
                gradient_bytes = float(self.load.gradient_bytes_U[group_U.ravel() == number].sum())
                group_s, lines_s = self._group_s(np.flatnonzero(holds_N), gradient_bytes)
                busy_s_N[holds_N] += group_s
                homes_s.update(lines_s)
        return max(float(busy_s_N.max(initial=0.0)), *homes_s.values(), 0.0)

    def _commanded_s(self, held_NU: Floats) -> float:
        """For how long those who hold something wait for commands: whoever coordinates them may be the farthest one."""
        held_N = held_NU.any(axis=1)
        return 2 * self.load.commands * float(self._delay_NN[np.ix_(held_N, held_N)].max(initial=0.0))

    def _group_s(self, members: Indexes, gradient_bytes: float) -> tuple[float, dict[int, float]]:
        """Of replicas that average all with all, or over clusters where they may and that is faster; and how long lines of homes
        are at it."""
        among, flat = self._averaging.among(members.tolist()), (0,) * len(members)
        sharings = sharings_of(part_shares(among.line_bps_N.tolist()), among)
        clusterings = {tuple(labels) for labels in self.clusters.label_LN[:, members].tolist()}
        several = [one for one in clusterings if 1 < len(set(one)) < len(members)] if self.load.over_clusters else []
        chosen, seconds, shares = fastest(among, gradient_bytes, sharings, several, flat)
        return seconds, among.homes_s(gradient_bytes, shares, chosen)

    # -- sketched

    def _passing_s(self, held_LNU: Floats) -> Floats:
        """Microbatches through all stages and back: computing, with lines beside it, and the way of the first one."""
        least = UNHELD / self.latency_s
        work_LN = np.maximum(held_LNU @ self.load.work_U, 1e-12)
        rates_LNU = held_LNU * (self.network.work_per_s_N / work_LN)[..., None]  # microbatches/s through each unit
        rate_LU = np.maximum(rates_LNU.sum(axis=1), least)
        lines_LU = rate_LU**2 / np.maximum((rates_LNU**2).sum(axis=1), least**2)  # that carry side by side
        hops_LV = self._hops_s(rates_LNU, rate_LU)
        busy_LV = self.load.microbatches * hops_LV / np.minimum(lines_LU[:, 1:], lines_LU[:, :-1])  # each way
        compute_L = _mean(self.load.microbatches / rate_LU, COMPUTE_SHARPNESS)
        line_L = busy_LV.max(axis=1, initial=0.0)
        passing_L: Floats = np.maximum(compute_L, line_L) + self.latency_s + 2 * hops_LV.sum(axis=1)
        return passing_L

    def _hops_s(self, rates_LNU: Floats, rate_LU: Floats) -> Floats:
        """[L, V]: seconds of the hop behind each unit but the last, for the mean microbatch: what finds no room with the same
        peer, or in the same cluster, has to leave it.

        Who holds a unit works on as much as it can, or on its share where more is held than is needed: the truth lies between.
        """
        inside_LKU = self._members_KN @ rates_LNU
        passing_LV = np.minimum(rate_LU[:, 1:], rate_LU[:, :-1])
        able_LKV = np.minimum(inside_LKU[..., 1:], inside_LKU[..., :-1]) / passing_LV[:, None]
        share_LKU = inside_LKU / rate_LU[:, None]
        stays_LKV = (1 - SHARED) * able_LKV + SHARED * np.minimum(share_LKU[..., 1:], share_LKU[..., :-1])
        hops_LV = self.clusters.rise_L.sum() - np.einsum("k,lkv->lv", self._rise_K, stays_LKV)
        return np.where(hops_LV > 1e-9 * self.clusters.rise_L.sum(), hops_LV, 0.0)

    def _averaging_s(self, held_LNU: Floats) -> Floats:
        """Each member of a unit's replicas sends a part to every other, twice: through its line, then along its slowest path."""
        gradient_U, delay_NN = 2 * self.load.gradient_bytes_U, 2 * self.network.delay_NN
        replicas_LU = np.maximum(held_LNU.sum(axis=1), 1.0)
        parts_LNN = (held_LNU * (gradient_U / replicas_LU)[:, None]) @ held_LNU.transpose(0, 2, 1)
        parts_LNN *= 1 - np.eye(self.network.peers)
        path_LN = (parts_LNN * self.path_NN + delay_NN * (parts_LNN > 0)).max(axis=2)
        sent_LN = (held_LNU @ (gradient_U * (1 - 1 / replicas_LU))[..., None])[..., 0]
        return _mean(sent_LN * self.line_N + path_LN, AVERAGING_SHARPNESS)


def _are_alike(one: Floats, other: Floats, least: float = 0.0) -> bool:
    return bool(((one <= REAL_CHANGE * other + least) & (other <= REAL_CHANGE * one + least)).all())


def _mean(seconds_WX: Floats, sharpness: int) -> Floats:
    """Power mean of each row: close to its maximum."""
    most_W1 = np.maximum(seconds_WX.max(axis=1, keepdims=True), 1e-12)
    mean_W: Floats = most_W1[:, 0] * ((seconds_WX / most_W1) ** sharpness).mean(axis=1) ** (1 / sharpness)
    return mean_W


def held_units(spans: Sequence[Span], units: int) -> Floats:
    """[X, U]: 1 where a span has a unit."""
    starts_X, ends_X = np.array(spans, dtype=np.intp).reshape(-1, 2).T
    units_U = np.arange(units)
    held_XU: Floats = ((starts_X[:, None] <= units_U) & (units_U < ends_X[:, None])).astype(float)
    return held_XU
