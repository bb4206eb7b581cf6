"""Forecast of the seconds of a training step, from the spans of all peers: each peer computes the same figure.

Microbatches are simulated through the stages (`step_forecast.py`); then come the averaging of gradients and the waiting for
commands. For the comparison of hundreds of arrangements a step is sketched in closed form instead, and only the best are
simulated. The terms of the sum are the slowest layers, or the busiest hop; the way of the first microbatch; and the slowest
replicas. The traffic between the holders of a layer and the holders of the next follows from `Clusters`.

The model of a training step: its microbatches go through stages and links in virtual time, wired and computed as they will be.

Stages compute one pass at a time, gradients first; links carry one message after another; each microbatch that is back makes room
for the next. So what a step takes follows from what its peers and links can do, down to the peers that finish last. Averaging
comes on top (`step_forecast.py`). Where peers choose their places, the coordinator expects a step and the simulator carries
one out it is these passes that count; the simulator alone knows of losses, and of links as they really are.
"""

from __future__ import annotations

import heapq
import itertools
import math
import statistics
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial

import numpy as np

from swarmnode.net.interfaces import PeerId
from swarmnode.plan.offline.grid import dendrogram
from swarmnode.plan.spans.flow import Floats, Indexes
from swarmnode.plan.spans.span_placement import REAL_CHANGE
from swarmnode.plan.training.averaging import AveragingNetwork, fastest, part_shares, sharings_of
from swarmnode.plan.training.wiring import Replica, Transfers, Wire, book, set_at_once, wire
from swarmnode.plan.view import Span
from swarmnode.plan.virtual_clock import Action, VirtualClock

FULL_PLAY = 128  # microbatches that go through; further ones take what those in the middle take
FORWARD_SHARE = 1 / 3  # of what a unit takes there and back
LONGEST_S = 1e8  # three years: a longer forecast means nothing
REMEMBERED = 5  # past steps that correct the next forecast


def passing_s(units: int, workers: Mapping[PeerId, Replica], transfers: Transfers, microbatches: int) -> float:
    """Return the seconds until `microbatches` have gone through the stages and back, as if nothing were booked. Infinite if a layer
    has no holder, or holders cannot do all of them."""
    played = min(microbatches, FULL_PLAY)
    ends_s = _Play(units, workers, transfers, played).run()
    if len(ends_s) < played:
        return math.inf
    middle_s = (ends_s[3 * played // 4 - 1] - ends_s[played // 4 - 1]) / (played // 2) if microbatches > played else 0.0
    return ends_s[-1] + (microbatches - played) * middle_s


class Way(IntEnum):
    """Ways through the model: a pass of either is computed of each microbatch, that of the most urgent way first
    (`compute/executor.py`)."""

    BACKWARD = 0
    FORWARD = 1


class PassQueue:
    """Computation of a peer in a step: one pass at a time, gradients before new microbatches. `began`: called with the
    seconds of each pass as it begins."""

    def __init__(self, clock: VirtualClock, began: Callable[[float], None] = lambda _takes_s: None) -> None:
        self._clock = clock
        self._began = began
        self._jobs: list[tuple[Way, int, float, Action]] = []
        self._numbers = itertools.count()
        self._is_busy = False
        self._is_stopped = False

    def submit(self, way: Way, takes_s: float, done: Action) -> None:
        """Queue a pass of `duration_s` seconds in the direction `way`, and call `done` after it."""
        heapq.heappush(self._jobs, (way, next(self._numbers), takes_s, done))
        if not self._is_busy:
            self._next()

    def stop(self) -> None:
        """Drop all queued passes, and the result of the one in progress."""
        self._is_stopped = True
        self._jobs.clear()

    def _next(self) -> None:
        if self._jobs:
            _, _, takes_s, done = heapq.heappop(self._jobs)
            self._is_busy = True
            self._began(takes_s)
            self._clock.after(takes_s, partial(self._finish, done))

    def _finish(self, done: Action) -> None:
        if self._is_stopped:
            return
        self._is_busy = False
        done()
        if not self._is_busy:
            self._next()


class Passage(ABC):
    """A microbatch on its way over the `queues` of its route: forward, and its gradient back. `counted`: the hops that have its
    gradient."""

    def __init__(self, queues: Sequence[PassQueue]) -> None:
        self._queues = queues
        self.counted: set[int] = set()
        self.called_back = False

    @abstractmethod
    def duration_s(self, way: Way, hop: int) -> float:
        """Return the seconds that a microbatch takes at a hop, in the direction `way`."""

    @abstractmethod
    def hand_on(self, way: Way, sender: int, receiver: int) -> None:
        """Send a hop's result to the next hop, and call `arrived` for that hop on arrival."""

    @abstractmethod
    def done(self) -> None:
        """Handle that the gradient is back at the first hop."""

    def arrived(self, way: Way, hop: int) -> None:
        """Queue the microbatch at hop `hop`, to be computed in the direction `way`."""
        self._queues[hop].submit(way, self.duration_s(way, hop), partial(self._computed, way, hop))

    def _computed(self, way: Way, hop: int) -> None:
        if self.called_back:
            return
        if way is Way.BACKWARD:
            self.counted.add(hop)
        if way is Way.FORWARD and hop + 1 == len(self._queues):
            self.arrived(Way.BACKWARD, hop)
        elif way is Way.BACKWARD and hop == 0:
            self.done()
        else:
            self.hand_on(way, hop, hop + 1 if way is Way.FORWARD else hop - 1)


class _Play:
    """Simulation of microbatches through idle copies of `workers`."""

    def __init__(self, units: int, workers: Mapping[PeerId, Replica], transfers: Transfers, microbatches: int) -> None:
        self.workers = {peer: replace(worker, booked_units=0, in_flight=0) for peer, worker in workers.items()}
        self._transfers, self._clock = transfers.idle(), VirtualClock()
        set_at_once(units, self.workers, self._transfers)
        self.queues = {peer: PassQueue(self._clock) for peer in workers}
        self.lines = transfers.lines(self._clock)
        self._fixed: Sequence[PeerId | None] = [None] * units
        self._left = microbatches
        self._ends_s: list[float] = []

    def run(self) -> Sequence[float]:
        """Run the simulation, and return the times in seconds at which the microbatches were back, in order."""
        self._lease()
        self._clock.run_out()
        return self._ends_s

    def _lease(self) -> None:
        while self._left:
            route = wire(self.workers, self._fixed, self._transfers, left=self._left)
            if route is None:
                return
            self._left -= 1
            book(route, self.workers, self._transfers, 1)
            _PlayedMicrobatch(self, route).arrived(Way.FORWARD, 0)

    def done(self, route: Sequence[Wire]) -> None:
        """Release the bookings of a microbatch that is back, record its time, and send the next ones."""
        book(route, self.workers, self._transfers, -1)
        self._ends_s.append(self._clock.now_s)
        self._lease()


class _PlayedMicrobatch(Passage):
    """Microbatch of a simulated step on its route through the stages."""

    def __init__(self, play: _Play, route: Sequence[Wire]) -> None:
        super().__init__([play.queues[peer] for peer, _ in route])
        self._play, self._route = play, route

    def duration_s(self, way: Way, hop: int) -> float:
        """Return the seconds that the stage at `hop` computes for this microbatch in one direction: its share of the forward and
        backward pass."""
        peer, span = self._route[hop]
        share = FORWARD_SHARE if way is Way.FORWARD else 1 - FORWARD_SHARE
        return share * span.units * self._play.workers[peer].assumed_unit_s

    def hand_on(self, way: Way, sender: int, receiver: int) -> None:
        """Send the microbatch from hop `sender` to hop `receiver` over the simulated links, in the direction `way`."""
        here, there = self._route[sender][0], self._route[receiver][0]
        self._play.lines.send(here, there, partial(self.arrived, way, receiver))

    def done(self) -> None:
        """Report to the simulation that this microbatch is back."""
        self._play.done(self._route)


class ExpectedStep:
    """Expected seconds of a run's next step: its forecast times the median ratio of real to forecast seconds of the last steps,
    since no forecast includes trainers, updates and commands. `expected_s`: seconds of the current step; 0 if unknown."""

    def __init__(self) -> None:
        self.expected_s = 0.0
        self._forecast_s = 0.0
        self._ratios = deque([1.0], maxlen=REMEMBERED)  # a first step, which warms up, is not believed alone

    @property
    def correction(self) -> float:
        """Median ratio of real to forecast seconds over the last steps."""
        return statistics.median(self._ratios)

    def begin(self, forecast_s: float) -> None:
        """Begin a step with this forecast. Peers report their own speeds, so a forecast that is not positive, or not below
        `LONGEST_S`, is ignored."""
        self._forecast_s = forecast_s if 0 < forecast_s < LONGEST_S else 0.0
        self.expected_s = min(self._forecast_s * self.correction, LONGEST_S)

    def end(self, step_s: float, forecast_s: float = 0.0) -> None:
        """Learn from a step that took `step_s`. `forecast_s`: the forecast of that step by present knowledge; 0 if there is
        none, then the forecast from its beginning counts. So the errors of estimates before the first step are not learnt."""
        forecast_s = forecast_s if 0 < forecast_s < LONGEST_S else self._forecast_s
        if forecast_s > 0 and step_s > 0:
            self._ratios.append(step_s / forecast_s)


COMPUTE_SHARPNESS, AVERAGING_SHARPNESS = 8, 16
SHARED = 0.25  # share of the surplus capacity that is spread evenly, not left to the nearest holder
SAME_DELAY_S = 0.005  # delays that differ by less are the same
LEVELS = 6  # the most scales of clusters
UNHELD = 1e-3  # of a peer's speed on the whole model: the assumed speed of a unit without a holder


@dataclass(frozen=True, eq=False)
class TrainingLoad:
    """Load of a step: its microbatches, the activation bytes of one between stages, and per layer bytes of gradients, work
    (in any measure) and bytes of trained state. `over_clusters`: whether replicas may average over clusters. `commands`: the
    coordinator's round trips that all peers wait for."""

    microbatches: int
    activation_bytes: float
    gradient_bytes_U: Floats
    work_U: Floats
    state_bytes_U: Floats
    over_clusters: bool = True
    commands: int = 0

    @property
    def units(self) -> int:
        """Number of layers of the model."""
        return len(self.work_U)


@dataclass(frozen=True, eq=False)
class TrainingNetwork:
    """Network of N peers: the work per second of each on one microbatch, and delays (seconds) and bandwidths (bits/s, 0 if
    unknown) between each two. `homes`: the home number of each peer; paths out of one home share a line."""

    work_per_s_N: Floats
    delay_NN: Floats
    bandwidth_NN: Floats
    homes: tuple[int, ...] = ()

    @property
    def peers(self) -> int:
        """Number of peers (N)."""
        return len(self.work_per_s_N)

    def is_as_fast(self, other: TrainingNetwork) -> bool:
        """Return whether the same peers have the same speeds in both networks, within the noise of measurements."""
        return _are_alike(self.work_per_s_N, other.work_per_s_N)

    def is_like(self, other: TrainingNetwork) -> bool:
        """Return whether two networks of the same peers differ only by the noise of measurements."""
        return (
            self.homes == other.homes
            and self.is_as_fast(other)
            and _are_alike(self.delay_NN, other.delay_NN, SAME_DELAY_S)
            and _are_alike(self.bandwidth_NN, other.bandwidth_NN)
        )

    @property
    def seconds_per_byte_NN(self) -> Floats:
        """Seconds per byte between two peers, by the slower of the two directions; 0 from a peer to itself. If neither
        direction is known, the median of the known paths counts, so that an unmeasured peer is no shortcut; 0 if no path is
        known."""
        known_NN = np.where(self.bandwidth_NN > 0, self.bandwidth_NN, np.inf)
        slowest_NN = np.minimum(known_NN, known_NN.T)
        told = slowest_NN[np.isfinite(slowest_NN) & ~np.eye(self.peers, dtype=bool)]
        slower_NN: Floats = 8 / np.where(np.isfinite(slowest_NN), slowest_NN, np.median(told) if len(told) else np.inf)
        np.fill_diagonal(slower_NN, 0.0)
        return slower_NN


class Clusters:
    """Clusters of N peers at several scales, by the slowest link between clusters. Single linkage turns hops into an
    ultrametric: two peers are as far apart as the level that joins their clusters. With an ultrametric, the least traffic
    between two sets of peers is a sum over clusters, without any matching (earth mover's distance on a tree).

    `rise_L`: the extra seconds of a hop that leaves the clusters of a level; `label_LN`: the cluster of each peer at each
    level (at the first level every peer is alone); `order`: all peers, sorted so that clusters of any level are contiguous.
    """

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

    def members(self) -> tuple[Floats, Floats]:
        """Return all clusters of all levels, as two arrays: [K, N], 1 where a peer belongs to a cluster and else 0; and [K], the
        extra seconds of a hop that leaves the clusters of that level (`rise_L`). K is 0 if there is only one peer."""
        each = [np.eye(int(labels.max()) + 1)[labels].T for labels in self.label_LN]
        if not each:
            return np.zeros((0, self.label_LN.shape[1])), np.zeros(0)
        return np.concatenate(each), np.repeat(self.rise_L, [len(one) for one in each])

    def sizes(self, chosen: Indexes) -> Floats:
        """Return [L, C]: at each level, the number of chosen peers in the cluster of each chosen peer."""
        labels_LC = self.label_LN[:, chosen]
        sizes_LC: Floats = (labels_LC[:, :, None] == labels_LC[:, None, :]).sum(axis=2).astype(float)
        return sizes_LC


def _scales(heights: Floats) -> list[Floats]:
    """Cut the ascending `heights` into at most `LEVELS` groups, at the largest ratios between neighbours."""
    steps = np.diff(np.log(np.maximum(heights, 1e-9)))
    cuts = np.sort(np.argsort(-steps, kind="stable")[: LEVELS - 1])
    return np.split(heights, cuts + 1)


class StepForecast:
    """Forecast of the seconds of a training step for any arrangement of layers on peers."""

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

    def unit_s(self, stages: int) -> Floats:
        """Return [U]: the seconds that a layer adds to its stage with `stages` stages: its computing, and its gradients on
        the slowest line."""
        compute_U = stages * self.load.microbatches * self.load.work_U / self.network.work_per_s_N.sum()
        unit_s_U: Floats = compute_U + 2 * self.load.gradient_bytes_U * self.line_N.max() + 1e-9
        return unit_s_U

    def step_s(self, spans: Sequence[Span]) -> float:
        """Return the seconds of a step with all peers on `spans`: passes of the microbatches, averaging of gradients, and
        waiting for commands. The passes are simulated, or sketched if some layer has no holder."""
        key = tuple(spans)
        if key not in self._played_s:
            held_NU = held_units(spans, self.load.units)
            # the replicas of the peers with layers, by name, and the transfers between them
            chosen = [number for number, span in enumerate(spans) if span.units]
            names = [f"{number:06d}" for number in chosen]
            unit_s = [
                float(self.load.work_U[slice(*spans[one])].mean() / self.network.work_per_s_N[one]) for one in chosen
            ]
            transfers, pairs = Transfers(), np.ix_(chosen, chosen)
            homes = [self.network.homes[number] for number in chosen] if self.network.homes else ()
            transfers.know(names, self._delay_NN[pairs], self.load.activation_bytes * self.path_NN[pairs], homes)
            workers = {name: Replica(spans[one], s) for name, one, s in zip(names, chosen, unit_s, strict=True)}
            passed_s = passing_s(self.load.units, workers, transfers, self.load.microbatches)
            if not math.isfinite(passed_s):
                passed_s = float(self._passing_s(held_NU[None])[0])
            # holders wait for commands by the longest delay: the coordinator may be the farthest peer
            held_N = held_NU.any(axis=1)
            commanded_s = 2 * self.load.commands * float(self._delay_NN[np.ix_(held_N, held_N)].max(initial=0.0))
            self._played_s[key] = passed_s + self._averaged_s(held_NU) + commanded_s
        return self._played_s[key]

    def sketch_s(self, held_LNU: Floats) -> Floats:
        """Return [L]: the approximate seconds of a step in each of several arrangements, in closed form, for comparing
        hundreds of them. Each term is close to its slowest part, but every part counts a little (power means), so that a
        move of one peer that helps a little shows."""
        return self._passing_s(held_LNU) + self._averaging_s(held_LNU)

    def fetching_s(self, spans: Sequence[Span], peer: int, window: Span) -> float:
        """Return the seconds to fetch the trained state of the layers of `window` that `peer` does not hold. Each layer comes
        from its fastest other holder, or from a disk over the peer's fastest path if there is none."""
        held_NU = held_units(spans, self.load.units)
        new_U = held_units([window], self.load.units)[0] > held_NU[peer]
        path_N1 = np.where(np.arange(len(spans)) == peer, np.inf, self.path_NN[:, peer])[:, None]
        path_U = np.where(held_NU > 0, path_N1, np.inf).min(axis=0)
        path_U = np.where(np.isfinite(path_U), path_U, self.line_N[peer])  # from a disk if no other peer holds it
        return float((self.load.state_bytes_U * path_U)[new_U].sum())

    def _averaged_s(self, held_NU: Floats) -> float:
        """Return the seconds until the peer with most to average is done, or the busiest shared line of a home. Layers with
        the same holders form one group; groups average one after another."""
        holders_GN, group_U = np.unique(held_NU.T > 0, axis=0, return_inverse=True)
        busy_s_N, homes_s = np.zeros(len(held_NU)), Counter[int]()
        for number, holds_N in enumerate(holders_GN):
            if holds_N.sum() > 1:
                gradient_bytes = float(self.load.gradient_bytes_U[group_U.ravel() == number].sum())
                members = np.flatnonzero(holds_N)
                among, flat = self._averaging.among(members.tolist()), (0,) * len(members)
                sharings = sharings_of(part_shares(among.line_bps_N.tolist()), among)
                labels = self.clusters.label_LN[:, members] if self.load.over_clusters else np.zeros((0, 0))
                several = {one for one in map(tuple, labels.tolist()) if 1 < len(set(one)) < len(members)}
                chosen, seconds, shares = fastest(among, gradient_bytes, sharings, several, flat)
                busy_s_N[holds_N] += seconds
                homes_s.update(among.homes_s(gradient_bytes, shares, chosen))
        return max(float(busy_s_N.max(initial=0.0)), *homes_s.values(), 0.0)

    # -- sketched

    def _passing_s(self, held_LNU: Floats) -> Floats:
        """Estimate roughly the seconds of all microbatches: computing, with lines side by side, and the way of the first one."""
        least = UNHELD / self.latency_s
        work_LN = np.maximum(held_LNU @ self.load.work_U, 1e-12)
        rates_LNU = held_LNU * (self.network.work_per_s_N / work_LN)[..., None]  # microbatches/s through each unit
        rate_LU = np.maximum(rates_LNU.sum(axis=1), least)
        lines_LU = rate_LU**2 / np.maximum((rates_LNU**2).sum(axis=1), least**2)  # that carry side by side
        # [L, V]: the seconds of the hop behind each layer but the last for the mean microbatch. Microbatches without room at the
        # same peer, or in the same cluster, have to leave it. A holder of a layer works at full capacity, or on its share if more
        # is held than needed: the truth lies between.
        inside_LKU = self._members_KN @ rates_LNU
        passing_LV = np.minimum(rate_LU[:, 1:], rate_LU[:, :-1])
        able_LKV = np.minimum(inside_LKU[..., 1:], inside_LKU[..., :-1]) / passing_LV[:, None]
        share_LKU = inside_LKU / rate_LU[:, None]
        stays_LKV = (1 - SHARED) * able_LKV + SHARED * np.minimum(share_LKU[..., 1:], share_LKU[..., :-1])
        hops_LV = self.clusters.rise_L.sum() - np.einsum("k,lkv->lv", self._rise_K, stays_LKV)
        hops_LV = np.where(hops_LV > 1e-9 * self.clusters.rise_L.sum(), hops_LV, 0.0)
        busy_LV = self.load.microbatches * hops_LV / np.minimum(lines_LU[:, 1:], lines_LU[:, :-1])  # each way
        compute_L = _mean(self.load.microbatches / rate_LU, COMPUTE_SHARPNESS)
        line_L = busy_LV.max(axis=1, initial=0.0)
        passing_L: Floats = np.maximum(compute_L, line_L) + self.latency_s + 2 * hops_LV.sum(axis=1)
        return passing_L

    def _averaging_s(self, held_LNU: Floats) -> Floats:
        """Estimate roughly the seconds of averaging: each replica of a layer sends a part to every other one, twice, through its
        line and then along its slowest path."""
        gradient_U, delay_NN = 2 * self.load.gradient_bytes_U, 2 * self.network.delay_NN
        replicas_LU = np.maximum(held_LNU.sum(axis=1), 1.0)
        parts_LNN = (held_LNU * (gradient_U / replicas_LU)[:, None]) @ held_LNU.transpose(0, 2, 1)
        parts_LNN *= 1 - np.eye(self.network.peers)
        path_LN = (parts_LNN * self.path_NN + delay_NN * (parts_LNN > 0)).max(axis=2)
        sent_LN = (held_LNU @ (gradient_U * (1 - 1 / replicas_LU))[..., None])[..., 0]
        return _mean(sent_LN * self.line_N + path_LN, AVERAGING_SHARPNESS)


def _are_alike(first: Floats, other: Floats, least: float = 0.0) -> bool:
    return bool(((first <= REAL_CHANGE * other + least) & (other <= REAL_CHANGE * first + least)).all())


def _mean(seconds_WX: Floats, sharpness: int) -> Floats:
    """Return the power mean of each row: close to its maximum."""
    most_W1 = np.maximum(seconds_WX.max(axis=1, keepdims=True), 1e-12)
    mean_W: Floats = most_W1[:, 0] * ((seconds_WX / most_W1) ** sharpness).mean(axis=1) ** (1 / sharpness)
    return mean_W


def held_units(spans: Sequence[Span], units: int) -> Floats:
    """Return [X, U]: 1 if a span contains a layer, else 0."""
    starts_X, ends_X = np.array(spans, dtype=np.intp).reshape(-1, 2).T
    units_U = np.arange(units)
    held_XU: Floats = ((starts_X[:, None] <= units_U) & (units_U < ends_X[:, None])).astype(float)
    return held_XU
