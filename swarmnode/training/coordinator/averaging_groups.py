"""Averaging groups: the peers that average together, and their clusters, from the measured rates of their paths.

Where factors alternate (ACP-SGD), they also tell which groups may go on from the factors of their last sum.

All-reduce attempt: the coordinator's view of one attempt of the replicas to agree on their gradients.
"""

from __future__ import annotations

import itertools
import logging
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass

import msgspec
import numpy as np

from swarmnode import tolerances
from swarmnode.codec.body import SHARED
from swarmnode.codec.training_messages import Group, How, PathRate, Reduce, Reduced
from swarmnode.counting import layers
from swarmnode.decisions import DecisionLog, Topic
from swarmnode.net.interfaces import PeerId
from swarmnode.plan.routes.delays import sharing_lines
from swarmnode.plan.training.averaging import (
    AveragingClusters,
    AveragingNetwork,
    ClusteredGroup,
    Count,
    Holder,
    averaging_s,
    make_groups,
    may_cluster,
)
from swarmnode.swarm.records.run import Run
from swarmnode.training.coordinator.link_times import LinkTimes
from swarmnode.training.coordinator.worker_group import WorkerHandle, WorkerState

SLOWEST_BPS = 262_144.0  # 32 KiB/s, as for any payload: slower peers are not waited for anyway

Had = Mapping[PeerId, tuple[WorkerHandle, int]]
"""The members that committed a sum, each with its handle and the number of its moves."""


class WarmStarts:
    """Record of the groups that may go on from the factors of their last sum: all members committed it and still remember it. A
    member that joins or comes back makes the group begin anew."""

    def __init__(self) -> None:
        self._had: dict[tuple[tuple[int, ...], int], Had] = {}

    def clear(self) -> None:
        """Forget which members remember their last sums, since they may have lost them."""
        self._had.clear()

    def may(self, group: Group, members: Iterable[WorkerHandle]) -> bool:
        """Return whether all members of `group` still have the factors of its last sum."""
        had, here = self._had.get((group.blocks, group.how), {}), {member.peer: member for member in members}
        return all(_still_has(had, here.get(member.peer)) for member in group.members)

    def committed(self, groups: Iterable[Group], members: Iterable[WorkerHandle]) -> None:
        """Record which of the usable `members` have committed the sums of `groups`. Earlier groups of the same kind that share
        blocks with them are forgotten."""
        had = {member.peer: (member, member.moves) for member in members if member.state is WorkerState.USABLE}
        for group in groups:
            blocks = set(group.blocks)
            self._had = {
                key: earlier for key, earlier in self._had.items() if key[1] != group.how or blocks.isdisjoint(key[0])
            }
            self._had[group.blocks, group.how] = {
                member.peer: had[member.peer] for member in group.members if member.peer in had
            }


def _still_has(had: Had, member: WorkerHandle | None) -> bool:
    if member is None or member.peer not in had or member.state is not WorkerState.USABLE:
        return False
    handle, moves = had[member.peer]
    return handle is member and moves == member.moves


class AveragingGroups:
    """The averaging groups of one coordinator.

    A path is as fast as the slower of its directions, each reported by its receiver. One peer alone cannot make a path look
    fast, and a peer that reports slow paths isolates only itself. `codecs`: those that the swarm allows.
    """

    def __init__(self, units: int, link_times: LinkTimes, codecs: Collection[int], decisions: DecisionLog) -> None:
        self.attempts = itertools.count(1)  # numbers of the all-reduce attempts
        self._units = units
        self._link_times = link_times
        self._codecs = codecs
        self._decisions = decisions
        self.clusters = AveragingClusters()
        self.warm_starts = WarmStarts()
        self._received_bps: dict[PeerId, dict[PeerId, float]] = {}  # by receiver and sender

    def record_rates(self, peer: PeerId, rates: Iterable[PathRate]) -> None:
        """Record how fast the parts of other members reached `peer`. Earlier rates of members that are not in `rates` stay."""
        self._received_bps.setdefault(peer, {}).update({rate.peer: rate.received_bps for rate in rates})

    def make(self, run: Run, step: int, members: Sequence[WorkerHandle], count: Count) -> list[Group]:
        """Return the groups for the end of `step`, and forget the rates of peers that are not among `members`."""
        here = {member.peer for member in members}
        self._received_bps = {
            receiver: {sender: bps for sender, bps in told.items() if sender in here}
            for receiver, told in self._received_bps.items()
            if receiver in here
        }
        self.clusters.begin()
        chosen = self._choose(run, step, members, count)
        for one in chosen:
            self._tell(one)
        groups = [one.group for one in chosen]
        if not run.averaging.alternating:
            return groups
        return [msgspec.structs.replace(one, warm_start=self.warm_starts.may(one, members)) for one in groups]

    def expected_s(self, run: Run, step: int, members: Sequence[WorkerHandle]) -> float:
        """Estimate the seconds of the averaging at the end of `step` if all members take part; 0 if none has to average."""
        chosen = [
            one
            for one in self._choose(run, step, members, lambda _peer, _units: 1)
            if one.group.how != How.APART and len(one.group.members) > 1
        ]
        return max((averaging_s(member.peer, chosen) for member in members), default=0.0)

    def _choose(self, run: Run, step: int, members: Sequence[WorkerHandle], count: Count) -> list[ClusteredGroup]:
        holders = [
            Holder(
                member.peer, member.span, member.state is WorkerState.LISTENING, self._link_times.line_bps(member.peer)
            )
            for member in members
        ]
        groups = make_groups(self._units, run, step, holders, count, self._codecs)
        peers = [member.peer for member in members]
        lines_bps = [self._link_times.line_bps(peer) or np.inf for peer in peers]
        delay_NN, _ = self._link_times.between(peers, 1)
        longer_NN = np.maximum(delay_NN, delay_NN.T)
        homes = self._link_times.homes(peers)
        # The bits/s [N, N] of the paths, each at the slower of its directions; infinite if it is not known for both. Measured
        # rates of parts count. Before there are any, and on paths that share a home's line with others, announced rates count
        # if they are higher.
        told_NN = np.array(
            [[self._received_bps.get(there, {}).get(here, 0.0) for there in peers] for here in peers], dtype=float
        )
        announced_NN = self._link_times.paths_bps(peers)
        slower_NN = np.minimum(told_NN, told_NN.T)
        sharing_NN = sharing_lines(homes, len(peers))
        either_NN = np.maximum(slower_NN, np.minimum(announced_NN, announced_NN.T))
        slower_NN = np.where((slower_NN > 0) & ~sharing_NN, slower_NN, either_NN)
        paths_bps = np.where(slower_NN > 0, np.maximum(slower_NN, SLOWEST_BPS), np.inf)
        network = AveragingNetwork(paths_bps, np.array(lines_bps), longer_NN, homes)
        places = {member.peer: place for place, member in enumerate(members)}
        return [
            self.clusters.choose(
                group,
                network.among([places[member.peer] for member in group.members]),
                self._link_times.averaged_bytes(group.blocks, run.averaging),
                allowed=may_cluster(run.averaging),
            )
            for group in groups
        ]

    def _tell(self, chosen: ClusteredGroup) -> None:
        clusters = len({member.cluster for member in chosen.group.members})
        units = sorted(block for block in chosen.group.blocks if block != SHARED)
        if clusters > 1 and units:
            self._decisions.record(
                Topic.TRAINING,
                f"averages {layers(units[0], units[-1] + 1)} in {clusters} groups of machines near one another",
                (f"that takes about {chosen.seconds:.2f} s, in a single group {chosen.flat_s:.2f} s",),
                units=(units[0], units[-1] + 1),
            )


log = logging.getLogger(__name__)

LARGEST_SQUARE = 1e90  # no vector of float32 numbers has a larger square


@dataclass(eq=False)
class AllReduceAttempt:
    """An attempt at an all-reduce. Each of `peers` is asked to take part in its groups; the attempt is over once all have answered.
    `run` is the run's id, `within_s` the peers' time limit in seconds, and `clock` returns seconds."""

    step: int
    attempt: int
    groups: Sequence[Group]
    peers: Collection[PeerId]
    _: KW_ONLY
    run: bytes = b""
    within_s: float = 0.0
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.began_s = self.clock()
        self.failures: dict[PeerId, PeerId] = {}  # failed peer -> the peer that it accuses, or itself
        self.late: set[PeerId] = set()  # not done in time; they accuse no peer
        self._failed_at_s: float | None = None  # time of the first failure
        self._waiting = set(self.peers)
        self._squares: dict[int, dict[PeerId, float]] = {}  # reported squares, by group and reporting peer
        self._suspects: dict[PeerId, PeerId] = {}  # the peer that each peer suspects

    def __repr__(self) -> str:
        return f"<AllReduce {self.attempt} of step {self.step}, waiting for {len(self._waiting)}>"

    @property
    def over(self) -> bool:
        """Whether every peer has answered."""
        return not self._waiting

    @property
    def failed(self) -> bool:
        """Whether a peer failed or was late."""
        return bool(self.failures or self.late)

    def is_decided(self) -> bool:
        """Return whether the attempt needs no more answers: all peers have answered, or OTHERS_S have passed since the
        first failure."""
        waited_s = 0.0 if self._failed_at_s is None else self.clock() - self._failed_at_s
        return self.over or (bool(self.failures) and waited_s >= tolerances.OTHERS_S)

    def request(self, peer: PeerId) -> Reduce:
        """Return the REDUCE message to `peer`, with the groups of blocks that it averages."""
        return Reduce(self.step, self.attempt, tuple(self._groups_of(peer)), self.run, self.within_s)

    def _groups_of(self, peer: PeerId) -> list[Group]:
        return [group for group in self.groups if any(member.peer == peer for member in group.members)]

    def accept(self, peer: PeerId, body: Reduced) -> bool:
        """Record the answer of `peer`. Returns whether it counts. Ignores an answer to an earlier attempt and a second answer. A
        malformed answer makes the peer fail."""
        if body.attempt != self.attempt or body.step != self.step or peer not in self._waiting:
            return False
        groups = self._groups_of(peer)
        if len(body.squares) != len(groups) or not all(0 <= square <= LARGEST_SQUARE for square in body.squares):
            self.fail(peer, None)
            return False
        for group, square in zip(groups, body.squares, strict=True):
            self._squares.setdefault(group.number, {})[peer] = square
        self._suspects[peer] = body.suspect
        self._waiting.discard(peer)
        return True

    def fail(self, peer: PeerId, accused: PeerId | None) -> None:
        """Record that `peer` failed and accuses `accused`; None accuses itself. Ignores a peer that has answered."""
        if self._ends(peer):
            self.failures[peer] = accused or peer

    def expire(self, peer: PeerId) -> None:
        """Record that `peer` was not done in time. Ignores a peer that has answered."""
        if self._ends(peer):
            self.late.add(peer)

    def lose(self, peer: PeerId) -> None:
        """Record that `peer` is lost. This is its own failure, so that the attempt is decided at once."""
        if peer in self._waiting:
            self.fail(peer, None)
            self._failed_at_s = -math.inf

    def _ends(self, peer: PeerId) -> bool:
        """Mark `peer` as answered with a failure. Returns False if it has answered before."""
        if peer not in self._waiting:
            return False
        self._waiting.discard(peer)
        self._failed_at_s = self.clock() if self._failed_at_s is None else self._failed_at_s
        return True

    @property
    def contributors(self) -> set[PeerId]:
        """Ids of the peers whose gradients are summed in this attempt."""
        return {member.peer for group in self.groups for member in group.members if member.count}

    @property
    def convicted(self) -> PeerId | None:
        """The contributor whose contribution is not its gradient, in the view of more than half of the group's other contributors;
        None if there is none. At least two must say so, since the word of one member decides nothing about another."""
        for group in self.groups:
            contributors = {member.peer for member in group.members if member.count}
            voices = Counter(self._suspects.get(peer) for peer in contributors if self._suspects.get(peer) != peer)
            for peer in sorted(contributors):
                if voices[peer] > max(1, (len(contributors) - 1) / 2):
                    return peer
        return None

    @property
    def culprit(self) -> PeerId | None:
        """The peer to leave out of the next attempt; None if all failures were only late answers.

        An accused peer comes first if it has not answered or has several accusers. Otherwise it is the first of the peers
        that failed, since the word of one member decides nothing about another.
        """
        accused = Counter(name for peer, name in self.failures.items() if name != peer)
        for name, count in sorted(accused.items(), key=lambda item: (-item[1], item[0])):
            if name in self._waiting or count > 1:
                return name
        return min(self.failures, default=None)

    def norm(self) -> float:
        """Return the norm of the gradient over the whole model. The squares that one peer alone reports are capped at LARGEST_RATIO
        times all others together: an absurd norm would clip the update of every layer to nothing."""
        squares = {group.number: self._square(group) for group in self.groups}
        alone = {number: next(iter(told)) for number, told in self._squares.items() if len(told) == 1}
        for peer in set(alone.values()):
            own = [number for number in squares if alone.get(number) == peer]
            others = math.fsum(square for number, square in squares.items() if number not in own)
            total = math.fsum(squares[number] for number in own)
            if others > 0 and total > tolerances.LARGEST_RATIO * others:
                log.warning("stage %s alone reports %.1e times the square of all others", peer, total / others)
                squares |= {number: squares[number] / total * tolerances.LARGEST_RATIO * others for number in own}
        return math.sqrt(math.fsum(squares.values()))

    def _square(self, group: Group) -> float:
        """Return the group's square; 0 if none was reported. Replicas that sum report the same square, so the lower median is
        taken: one liar of two can only lower it, one of three or more cannot move it. Replicas that update apart report
        different squares, so the mean is taken."""
        told = [*self._squares.get(group.number, {}).values()] or [0.0]
        return statistics.median_low(told) if group.how == How.SUM else math.fsum(told) / len(told)
