"""Averaging clusters: whether replicas average all with all, or over clusters: inside, then between, then back.

Clusters are what is joined by fast paths; which of a network's clusterings is the fastest, if any is faster than none, follows from
what averaging will take (`averaging_forecast.py`). What was chosen stays until something is faster by far.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

import msgspec
import numpy as np

from swarmnode.codec.averaging_messages import USUAL_SHARE, Group, How
from swarmnode.codec.tensors import Codec
from swarmnode.codec.training_fields import MAX_CLUSTERS
from swarmnode.net.interfaces import PeerId
from swarmnode.plan.offline.layouts import dendrogram
from swarmnode.plan.training.averaging_forecast import AveragingNetwork, part_shares
from swarmnode.swarm.records.run import Averaging

LEAST_MEMBERS = 3  # contributors: of two, both send all they have to one another
GAIN = 1.25  # times as fast as the one in force another clustering has to be
LEVELS = 8  # scales at which a network is looked at
UNBEARABLE = 4.0  # times as long as all with all, by one member's own measurements: it takes no part
REST = 16  # averagings all with all after one over clusters came to nothing

Clusters = tuple[int, ...]
Shares = tuple[int, ...]
"""Of each contributor, in their order"""


@dataclass(frozen=True)
class ClusteredGroup:
    """A group with its clusters, the seconds that it will take, and those of all with all."""

    group: Group
    seconds: float
    flat_s: float


def may_cluster(averaging: Averaging) -> bool:
    """Robust sums, and top-k's means of those who sent, need each contribution by itself."""
    return not averaging.robust and averaging.codec != Codec.TOPK


def averaging_s(peer: PeerId, groups: Sequence[ClusteredGroup]) -> float:
    """What a peer's groups take it, one after another."""
    return sum(one.seconds for one in groups if any(member.peer == peer for member in one.group.members))


class AveragingClusters:
    """Of the groups of one training, whose blocks name them."""

    def __init__(self) -> None:
        self._chosen: dict[tuple[int, ...], tuple[tuple[PeerId, ...], Clusters]] = {}
        self._rests = 0

    def __repr__(self) -> str:
        clustered = sum(len(set(clusters)) > 1 for _, clusters in self._chosen.values())
        return f"<AveragingClusters, {clustered} of {len(self._chosen)} groups over clusters>"

    def begin(self) -> None:
        """Another averaging."""
        self._rests = max(0, self._rests - 1)

    def give_up(self) -> None:
        """The last one came to nothing: all with all for a while, whoever was to blame."""
        if any(len(set(clusters)) > 1 for _, clusters in self._chosen.values()):
            self._rests = REST
            self._chosen.clear()

    def choose(
        self, group: Group, network: AveragingNetwork, size_bytes: float, *, allowed: bool = True
    ) -> ClusteredGroup:
        """`network`: of the group's members, in their order; `size_bytes`: of its vector as it travels; `allowed`: see
        `may_cluster`."""
        places = [place for place, member in enumerate(group.members) if member.count]
        names = tuple(group.members[place].peer for place in places)
        among, flat = network.among(places), (0,) * len(places)
        sharings = sharings_of([group.members[place].share for place in places], among)
        flat_s, shares = shared(among, size_bytes, sharings, flat)
        if len(places) < LEAST_MEMBERS or group.how == How.APART or self._rests or not allowed:
            return ClusteredGroup(_with_shares(group, places, shares), flat_s, flat_s)
        known, before = self._chosen.get(group.blocks, ((), flat))
        before = before if known == names else flat
        clusterings = {flat, *_clusterings(among, size_bytes)}
        best, seconds, shares = fastest(among, size_bytes, sharings, clusterings, before)
        self._chosen[group.blocks] = names, best
        dealt = _with_shares(group, places, shares)
        return ClusteredGroup(_with_clusters(dealt, network, places, best), seconds, flat_s)


def is_bearable(group: Group, peer: PeerId, received_bps: Mapping[PeerId, float]) -> bool:
    """Whether a member, by what it has measured itself, does not wait much longer over these clusters than all with all."""
    contributors = [member for member in group.members if member.count]
    names = [member.peer for member in contributors]
    if peer not in names or len({member.cluster for member in group.members}) < 2:
        return True
    own = names.index(peer)
    path_bps_NN = np.full((len(names), len(names)), np.inf)
    path_bps_NN[own] = path_bps_NN[:, own] = [received_bps.get(name) or np.inf for name in names]
    network = AveragingNetwork(path_bps_NN, np.full(len(names), np.inf), np.zeros_like(path_bps_NN))
    shares = [member.share for member in contributors]
    seconds = network.slowest_s(own, 1.0, shares, [member.cluster for member in contributors])
    return seconds <= UNBEARABLE * network.slowest_s(own, 1.0, shares, [0] * len(names))


def sharings_of(by_line: Sequence[int], network: AveragingNetwork) -> list[Shares]:
    """How much each may add up: as its line has it, all alike, or as its slowest path has it."""
    return [tuple(by_line), (USUAL_SHARE,) * len(by_line), part_shares(network.slowest_paths_bps().tolist())]


def fastest(
    network: AveragingNetwork,
    size_bytes: float,
    sharings: Sequence[Shares],
    clusterings: Iterable[Clusters],
    before: Clusters,
) -> tuple[Clusters, float, Shares]:
    """Return the clusters over which averaging takes least, its seconds, and the shares; those of `before` unless others are `GAIN`
    times as fast."""
    found = {clusters: shared(network, size_bytes, sharings, clusters) for clusters in {before, *clusterings}}
    best = min(found, key=lambda clusters: (found[clusters][0], clusters))
    chosen = best if found[best][0] * GAIN <= found[before][0] else before
    return chosen, *found[chosen]


def shared(
    network: AveragingNetwork, size_bytes: float, sharings: Sequence[Shares], clusters: Clusters
) -> tuple[float, Shares]:
    """Seconds over these clusters, and the shares with which it takes least; of those that take as long the first ones."""
    return min(((network.averaging_s(size_bytes, shares, clusters), shares) for shares in sharings), key=itemgetter(0))


def _with_shares(group: Group, places: Sequence[int], shares: Shares) -> Group:
    of = dict(zip(places, shares, strict=True))
    members = (
        msgspec.structs.replace(member, share=of.get(place, member.share)) for place, member in enumerate(group.members)
    )
    return msgspec.structs.replace(group, members=tuple(members))


def _clusterings(network: AveragingNetwork, size_bytes: float) -> Iterator[Clusters]:
    """At several scales, of no more clusters than there may be."""
    count = len(network.line_bps_N)
    cost_NN = 8 * size_bytes / count / network.path_bps_NN + network.delay_NN
    tree = dendrogram(np.maximum(cost_NN, cost_NN.T))
    for level in tree.levels(LEVELS):
        clusters = sorted(sorted(members) for members in tree.clusters(level))
        if 1 < len(clusters) <= min(MAX_CLUSTERS, count - 1):
            label = {place: number for number, members in enumerate(clusters) for place in members}
            yield tuple(label[place] for place in range(count))


def _with_clusters(group: Group, network: AveragingNetwork, places: Sequence[int], clusters: Clusters) -> Group:
    """Who only listens is where the nearest contributor is."""
    of = dict(zip(places, clusters, strict=True))
    for place in range(len(group.members)):
        nearest = min(places, key=lambda other: (-network.path_bps_NN[other, place], network.delay_NN[other, place]))
        of.setdefault(place, of[nearest])
    members = (msgspec.structs.replace(member, cluster=of[place]) for place, member in enumerate(group.members))
    return msgspec.structs.replace(group, members=tuple(members))
