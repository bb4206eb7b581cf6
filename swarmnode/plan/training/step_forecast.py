"""What a training step will take, from who holds what: one figure that every peer works out for itself.

Terms that add up: computing, as slow as the units with least speed; lines, on which activations and gradients of all microbatches
go one after another; the first microbatch's way through all stages; averaging, as slow as the slowest replicas. What must cross
between those who hold a unit and those who hold the next follows from clusters (`clusters.py`). The worst counts most, but every
term counts a little (power means), so that peers who see no more than what one of them could do find their way. Where all places
are compared, some microbatches are played through instead (`rehearsal.py`), and what lines carry goes beside computing; of the best
of them all are (`dry_run.py`). Who moves alone counts lines in full, and so stays where they are fast.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from swarmnode.net.interfaces import PeerId
from swarmnode.plan.spans.flow import Floats, Indexes
from swarmnode.plan.spans.hysteresis import REAL_CHANGE
from swarmnode.plan.training.averaging_clusters import GAIN, shared, sharings_of
from swarmnode.plan.training.averaging_forecast import AveragingNetwork
from swarmnode.plan.training.clusters import Clusters
from swarmnode.plan.training.dry_run import dry_run_s
from swarmnode.plan.training.rehearsal import rehearse
from swarmnode.plan.training.shares import part_shares
from swarmnode.plan.training.transfers import Transfers
from swarmnode.plan.training.wiring import Replica
from swarmnode.plan.view import Span

COMPUTE_SHARPNESS, LINE_SHARPNESS, AVERAGING_SHARPNESS = 8, 2, 16
SHARED = 0.25  # how much of what is held beyond need is shared out, not left to whoever is nearest
SAME_DELAY_S = 0.005  # delays that differ by less are the same
LAST = 1.5  # ways of a microbatch, at most, that uneven replicas are waited for: fitted to 197 layouts
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


class StepForecast:
    """Of one load on one network."""

    def __init__(self, load: TrainingLoad, network: TrainingNetwork) -> None:
        self.load, self.network = load, network
        self._arranged: dict[tuple[Span, ...], float] = {}
        self._run: dict[tuple[Span, ...], float] = {}
        self._closed: dict[tuple[Span, ...], float] = {}
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

    def step_s(self, spans: Sequence[Span], peer: int, windows: Sequence[Span]) -> Floats:
        """[W]: seconds of a step with `peer` on each of the windows, all others on their spans (empty: they hold nothing)."""
        held_NU, window_WU = self._held(spans, peer), held_units(windows, self.load.units)
        return self._passing_s(held_NU, peer, window_WU) + self._averaging_s(held_NU, peer, window_WU)

    def arranged_s(self, spans: Sequence[Span]) -> float:
        """Seconds of a step with all on their spans, to be compared with other ways to place all: its microbatches are wired, and
        its gradients averaged, as they will be, as far as units have holders."""
        key = tuple(spans)
        if key not in self._arranged:
            self._arranged[key] = self._played_s(spans) + self._closing_s(spans)
        return self._arranged[key]

    def dry_run_s(self, spans: Sequence[Span]) -> float:
        """The same, worked out for every microbatch where units have holders: closer, and slower to find."""
        key = tuple(spans)
        if key not in self._run:
            passing_s = dry_run_s(self.load.units, *self._stages(spans), self.load.microbatches)
            self._run[key] = passing_s + self._closing_s(spans) if passing_s < math.inf else self.arranged_s(spans)
        return self._run[key]

    def fetching_s(self, spans: Sequence[Span], peer: int, window: Span) -> float:
        """Until `peer` has what is learnt of those units of `window` that are not its own yet, each from its fastest holder."""
        held_NU = held_units(spans, self.load.units)
        new_U = held_units([window], self.load.units)[0] > held_NU[peer]
        path_N1 = np.where(np.arange(len(spans)) == peer, np.inf, self.path_NN[:, peer])[:, None]
        path_U = np.where(held_NU > 0, path_N1, np.inf).min(axis=0)
        path_U = np.where(np.isfinite(path_U), path_U, self.line_N[peer])  # from a disk, where nobody holds it
        return float((self.load.state_bytes_U * path_U)[new_U].sum())

    def _held(self, spans: Sequence[Span], but: int) -> Floats:
        held_NU = held_units(spans, self.load.units)
        held_NU[but] = 0.0
        return held_NU

    def _played_s(self, spans: Sequence[Span]) -> float:
        """Microbatches through all stages and back. Replicas share their work as they are fast; what lines carry, and how long one
        is under way, a rehearsal tells: the first ones are while no others are computed, one of each replica where most is to be
        done. And how uneven they are, so that slow ones are waited for at the end. Where units have nobody a formula has to do."""
        played = rehearse(self.load.units, *self._stages(spans))
        if played is None:
            return float(self._passing_s(self._held(spans, 0), 0, held_units(spans[:1], self.load.units))[0])
        held_NU = held_units(spans, self.load.units)
        rate_U = self._rates(held_NU, self.network.work_per_s_N).sum(axis=0)
        shared_s, at_once = float(1 / rate_U.min()), float(held_NU[:, rate_U.argmin()].sum())
        after_the_first_s = max(
            (self.load.microbatches - at_once) * shared_s, (self.load.microbatches - 1) * played.line_s, 0.0
        )
        uneven = 1 - min(1.0, shared_s / played.peer_s)
        return after_the_first_s + (1 + LAST * uneven) * played.way_s

    def _stages(self, spans: Sequence[Span]) -> tuple[dict[PeerId, Replica], Transfers]:
        """Who holds something, and what lies between them."""
        chosen = [number for number, span in enumerate(spans) if span.units]
        names = [f"{number:06d}" for number in chosen]
        unit_s = [float(self.load.work_U[slice(*spans[one])].mean() / self.network.work_per_s_N[one]) for one in chosen]
        transfers, pairs = Transfers(), np.ix_(chosen, chosen)
        homes = [self.network.homes[number] for number in chosen] if self.network.homes else ()
        transfers.know(names, self._delay_NN[pairs], self.load.activation_bytes * self.path_NN[pairs], homes)
        return {name: Replica(spans[one], s) for name, one, s in zip(names, chosen, unit_s, strict=True)}, transfers

    def _closing_s(self, spans: Sequence[Span]) -> float:
        """What follows on the microbatches, however these are forecast: averaging, and hearing what to do."""
        key = tuple(spans)
        if key not in self._closed:
            held_NU = held_units(spans, self.load.units)
            self._closed[key] = self._averaged_s(held_NU) + self._commanded_s(held_NU)
        return self._closed[key]

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
        found = {one: shared(among, gradient_bytes, sharings, one) for one in (flat, *several)}
        best = min(found, key=lambda one: found[one][0])
        chosen = best if found[best][0] * GAIN <= found[flat][0] else flat
        seconds, shares = found[chosen]
        return seconds, among.homes_s(gradient_bytes, shares, chosen)

    def _rates(self, held_NU: Floats, work_per_s: Floats) -> Floats:
        """Microbatches/s that each takes through each unit of its span, if it works on all of them alike."""
        work_N1 = np.maximum(held_NU @ self.load.work_U, 1e-12)[:, None]
        rates_NU: Floats = held_NU * work_per_s[..., None] / work_N1
        return rates_NU

    def _passing_s(self, held_NU: Floats, peer: int, window_WU: Floats) -> Floats:
        """Microbatches through all stages and back: computing, lines, and the way of the first one."""
        work_per_s_N = self.network.work_per_s_N
        others_NU = self._rates(held_NU, work_per_s_N)
        own_WU = self._rates(window_WU, work_per_s_N[peer : peer + 1])
        least = UNHELD / self.latency_s
        rate_WU = np.maximum(others_NU.sum(axis=0) + own_WU, least)
        hops_WV = self._hops_s(others_NU, own_WU, peer, rate_WU)
        lines_WU = rate_WU**2 / np.maximum((others_NU**2).sum(axis=0) + own_WU**2, least**2)  # that carry side by side
        count = self.load.microbatches
        busy_WV = 2 * count * hops_WV / np.minimum(lines_WU[:, 1:], lines_WU[:, :-1])
        boundaries = max(1, int((hops_WV > 0).sum(axis=1).max(initial=0)))
        line_W = ((busy_WV**LINE_SHARPNESS).sum(axis=1) / boundaries) ** (1 / LINE_SHARPNESS)
        compute_W = _mean(count / rate_WU, COMPUTE_SHARPNESS)
        passing_W: Floats = compute_W + line_W + self.latency_s + 2 * hops_WV.sum(axis=1)
        return passing_W

    def _hops_s(self, others_NU: Floats, own_WU: Floats, peer: int, rate_WU: Floats) -> Floats:
        """[W, V]: seconds of the hop behind each unit but the last, for the mean microbatch: what finds no room with the same
        peer, or in the same cluster, has to leave it.

        Who holds a unit works on as much as it can, or on its share where more is held than is needed: the truth lies between.
        """
        inside_KU = self._members_KN @ others_NU
        inside_WKU = inside_KU[None] + self._members_KN[:, peer, None] * own_WU[:, None]
        passing_WV = np.minimum(rate_WU[:, 1:], rate_WU[:, :-1])
        able_WKV = np.minimum(inside_WKU[..., 1:], inside_WKU[..., :-1]) / passing_WV[:, None]
        share_WKU = inside_WKU / rate_WU[:, None]
        stays_WKV = (1 - SHARED) * able_WKV + SHARED * np.minimum(share_WKU[..., 1:], share_WKU[..., :-1])
        hops_WV = self.clusters.rise_L.sum() - np.einsum("k,wkv->wv", self._rise_K, stays_WKV)
        return np.where(hops_WV > 1e-9 * self.clusters.rise_L.sum(), hops_WV, 0.0)

    def _averaging_s(self, held_NU: Floats, peer: int, window_WU: Floats) -> Floats:
        """Each member of a unit's replicas sends a part to every other, twice: through its line, then along its slowest path."""
        gradient_U, delay_NN = 2 * self.load.gradient_bytes_U, 2 * self.network.delay_NN
        others_NN = (held_NU * gradient_U / np.maximum(held_NU.sum(axis=0), 1.0)) @ held_NU.T
        np.fill_diagonal(others_NN, 0.0)
        path_N = (others_NN * self.path_NN + delay_NN * (others_NN > 0)).max(axis=1)
        replicas_WU = np.maximum(held_NU.sum(axis=0) + window_WU, 1.0)
        own_WN = (window_WU * gradient_U / replicas_WU) @ held_NU.T
        own_path_WN = own_WN * self.path_NN[peer] + delay_NN[peer] * (own_WN > 0)
        sent_WU = gradient_U * (1 - 1 / replicas_WU)
        seconds_WN = (sent_WU @ held_NU.T) * self.line_N + np.maximum(path_N, own_path_WN)
        seconds_WN[:, peer] = (window_WU * sent_WU).sum(axis=1) * self.line_N[peer] + own_path_WN.max(axis=1)
        return _mean(seconds_WN, AVERAGING_SHARPNESS)


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
