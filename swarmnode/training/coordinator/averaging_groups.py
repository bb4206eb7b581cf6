"""Averaging groups: the peers that average together, and their clusters, from the measured rates of their paths.

Where factors alternate (ACP-SGD), they also tell which groups may go on from the factors of their last sum.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec
import numpy as np

from swarmnode.codec.body import SHARED
from swarmnode.codec.training_messages import Group, How, PathRate
from swarmnode.counting import layers
from swarmnode.decisions import DecisionLog, Topic
from swarmnode.net.interfaces import PeerId
from swarmnode.plan.routes.delays import sharing_lines
from swarmnode.plan.spans.flow import Floats
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

    def hear(self, peer: PeerId, rates: Iterable[PathRate]) -> None:
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
        return [self._started(one.group, run, members) for one in chosen]

    def _started(self, group: Group, run: Run, members: Sequence[WorkerHandle]) -> Group:
        if not run.averaging.alternating:
            return group
        return msgspec.structs.replace(group, warm_start=self.warm_starts.may(group, members))

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
                member.peer,
                member.span,
                member.state is WorkerState.LISTENING,
                self._link_times.line_bps(member.peer),
            )
            for member in members
        ]
        groups = make_groups(self._units, run, step, holders, count, self._codecs)
        network = self._network([member.peer for member in members])
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

    def _network(self, peers: Sequence[PeerId]) -> AveragingNetwork:
        lines_bps = [self._link_times.line_bps(peer) or np.inf for peer in peers]
        delay_NN, _ = self._link_times.between(peers, 1)
        longer_NN = np.maximum(delay_NN, delay_NN.T)
        homes = self._link_times.homes(peers)
        return AveragingNetwork(self._paths_bps(peers, homes), np.array(lines_bps), longer_NN, homes)

    def _paths_bps(self, peers: Sequence[PeerId], homes: Sequence[int]) -> Floats:
        """Return the bits/s [N, N] of the paths, each at the slower of its directions; infinite if it is not known for both.

        Measured rates of parts count. Before there are any, and on paths that share a home's line with others, announced rates
        count if they are higher.
        """
        told_NN = np.array(
            [[self._received_bps.get(there, {}).get(here, 0.0) for there in peers] for here in peers], dtype=float
        )
        announced_NN = self._link_times.paths_bps(peers)
        slower_NN = np.minimum(told_NN, told_NN.T)
        sharing_NN = sharing_lines(homes, len(peers))
        either_NN = np.maximum(slower_NN, np.minimum(announced_NN, announced_NN.T))
        slower_NN = np.where((slower_NN > 0) & ~sharing_NN, slower_NN, either_NN)
        return np.where(slower_NN > 0, np.maximum(slower_NN, SLOWEST_BPS), np.inf)

    def _tell(self, chosen: ClusteredGroup) -> None:
        clusters = len({member.cluster for member in chosen.group.members})
        units = sorted(block for block in chosen.group.blocks if block != SHARED)
        if clusters > 1 and units:
            self._decisions.note(
                Topic.TRAINING,
                f"averages {layers(units[0], units[-1] + 1)} in {clusters} groups of machines near one another",
                (f"that takes about {chosen.seconds:.2f} s, in a single group {chosen.flat_s:.2f} s",),
                units=(units[0], units[-1] + 1),
            )
