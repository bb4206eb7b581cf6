"""Averaging: its seconds on a network, the shares of the members, and the clusters over which groups average.

Without clusters, each member sends its values of a part to the owner of the part, and the owner sends the sum to all
members. With clusters, one member per cluster gathers the values of a part there, sends their sum to the owner, and hands
the owner's sum back (`compute/training/averaging/parts.py`).

Groups of replicas that average at the end of a step, and the encoding of their values.

Every step (`Averaging.every` = 1): the gradients of each layer are summed over its replicas, and all replicas make the same
update.

Every H steps (DiLoCo, arXiv 2311.08105), after a warm-up with gradients summed in every step: in between each replica
updates by itself. At every H-th step, and at the last one, replicas average how far their parameters moved; see
`compute/training/block.py`. The parameters that the first and the last layer share must stay identical, so their gradient is
summed in every step unless all holders of the ends hold the whole model.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter

import msgspec
import numpy as np

from swarmnode.codec.body import SHARED
from swarmnode.codec.tensors import SPARSE_CODECS, Codec, DType, TensorInfo, payload_bytes
from swarmnode.codec.training_messages import MAX_CLUSTERS, MOST_SHARE, USUAL_SHARE, Form, Group, How, MemberSpec
from swarmnode.net.interfaces import PeerId
from swarmnode.plan.compression import LADDER, encoded_bytes
from swarmnode.plan.offline.grid import dendrogram
from swarmnode.plan.routes.delays import crowded
from swarmnode.plan.spans.flow import Floats, Indexes
from swarmnode.plan.view import Span
from swarmnode.swarm.records.run import Averaging, Run

LEAST_MEMBERS = 3  # contributors: two send each other all their values in any case
GAIN = 1.25  # times as fast as the one in force another clustering has to be
LEVELS = 8  # scales at which a network is looked at
UNBEARABLE = 4.0  # times as long as without clusters, by a member's own measurements: the member takes no part
REST = 16  # averagings all with all after one over clusters came to nothing

LEAST_SHARE = 1  # so that each owner sees a part of all other contributions
WIDENING = 4  # of the matrices of a layer, in widths of the model

Clusters = tuple[int, ...]
Shares = tuple[int, ...]
"""Share of each contributor, in the order of the contributors."""


@dataclass(frozen=True, eq=False)
class AveragingNetwork:
    """Network between N contributors: bits/s of each path and of each line, infinite if unknown, and one-way delays in
    seconds. `homes`: the home number of each contributor. Paths out of one home share a line; paths inside a home do not use
    it."""

    path_bps_NN: Floats
    line_bps_N: Floats
    delay_NN: Floats
    homes: tuple[int, ...] = ()

    def averaging_s(self, size_bytes: float, shares: Sequence[int], clusters: Sequence[int]) -> float:
        """Estimate the seconds until all contributors have the sum of a vector of `size_bytes` encoded bytes. Paths and
        lines carry side by side."""
        bits_NN = 8 * size_bytes * crossing(shares, clusters)
        lines_s = np.maximum(bits_NN.sum(axis=0), bits_NN.sum(axis=1)) / self._own_line_bps_N
        homes_s = max(self._homes_s(bits_NN).values(), default=0.0)
        # the round trip of the longest delay inside a cluster, and that of the longest one between clusters
        labels_N = np.asarray(clusters)
        inside_NN = labels_N[:, None] == labels_N[None, :]
        delays_s = 2 * float(np.where(inside_NN, self.delay_NN, 0).max() + np.where(inside_NN, 0, self.delay_NN).max())
        return max(self._in_turn_s(size_bytes, shares, clusters), float(lines_s.max()), homes_s) + delays_s

    def homes_s(self, size_bytes: float, shares: Sequence[int], clusters: Sequence[int]) -> dict[int, float]:
        """Return for each home the seconds that its line needs for all bits leaving the home, at the rate of the fastest
        path out of it. Empty if `homes` is empty; homes without a path out are left out."""
        return self._homes_s(8 * size_bytes * crossing(shares, clusters)) if self.homes else {}

    def _homes_s(self, bits_NN: Floats) -> dict[int, float]:
        home_N = np.array(self.homes)
        out_NN = {home: np.outer(home_N == home, home_N != home) for home in set(self.homes)}
        return {
            home: float(bits_NN[out].sum() / self.path_bps_NN[out].max()) for home, out in out_NN.items() if out.any()
        }

    @cached_property
    def _own_line_bps_N(self) -> Floats:
        """Lines of the contributors in bits/s; infinite for contributors that share the line of a home, which is counted for
        the home."""
        shares_N = crowded(self.homes, len(self.line_bps_N))
        own_line_bps_N: Floats = np.where(shares_N, np.inf, self.line_bps_N)
        return own_line_bps_N

    def among(self, places: Sequence[int]) -> AveragingNetwork:
        """Return the network between the contributors at `places`, in this order."""
        pairs = np.ix_(places, places)
        homes = tuple(self.homes[place] for place in places) if self.homes else ()
        return AveragingNetwork(self.path_bps_NN[pairs], self.line_bps_N[list(places)], self.delay_NN[pairs], homes)

    def slowest_s(self, number: int, size_bytes: float, shares: Sequence[int], clusters: Sequence[int]) -> float:
        """Estimate the seconds that contributor `number` needs on its slowest path, without shared lines and delays."""
        bits_NN = 8 * size_bytes * crossing(shares, clusters)
        return float((np.maximum(bits_NN, bits_NN.T) / self.path_bps_NN)[number].max())

    def _in_turn_s(self, size_bytes: float, shares: Sequence[int], clusters: Sequence[int]) -> float:
        """Estimate the seconds of the hops in turn: values inside clusters to their gatherers, gathered sums to the owners
        of parts, and sums back. A peer sends a sum only after its last addend has arrived, over a slow path or a busy line.
        Sums that come back are passed on inside a cluster as they arrive, those of the slowest cluster last."""
        gathered_NN = 8 * size_bytes * gathering(shares, clusters)
        labels_N = np.asarray(clusters)
        near_NN = (labels_N[:, None] == labels_N) & ~np.eye(len(labels_N), dtype=bool)
        inside_NN = near_NN * gathered_NN.sum(axis=1)
        between_NN = gathered_NN * (labels_N[:, None] != labels_N)
        added_up_N = self._come_s(self._come_s(np.zeros(len(labels_N)), inside_NN, busy=True), between_NN, busy=True)
        back_N = self._come_s(added_up_N, between_NN.T)
        last_N = np.stack([between_NN[:, labels_N == label].sum(axis=1) for label in np.unique(labels_N)]).max(axis=0)
        return float(
            max(self._come_s(added_up_N, inside_NN.T).max(), self._come_s(back_N, near_NN * last_N[:, None]).max())
        )

    def _come_s(self, sent_N: Floats, bits_NN: Floats, *, busy: bool = False) -> Floats:
        """Return [N]: the time at which each contributor has received all `bits_NN`, sent at the times `sent_N`, by the
        paths and, if `busy`, by the senders' lines; at least `sent_N`."""
        line_s_N = bits_NN.sum(axis=1) / self._own_line_bps_N * busy
        come_NN = sent_N[:, None] + np.maximum(bits_NN / self.path_bps_NN, line_s_N[:, None])
        come_N: Floats = np.maximum(sent_N, np.where(bits_NN > 0, come_NN, 0.0).max(axis=0))
        return come_N


def part_shares(lines_bps: Sequence[float]) -> tuple[int, ...]:
    """Return how much of a group's vector each contributor adds up, relative to the others, from `lines_bps` (0: unknown).
    All get `USUAL_SHARE` if there are fewer than three contributors or no line is known: of two, both send the whole vector
    once anyway.

    A contributor that adds up a share s of the vector of n contributors sends its values of all other parts, and its own
    sums to all others: 1 + (n - 2) s times the vector; it receives as much. So a contributor with a slow line adds up
    little. Peers report their own lines, so no line counts for more than `MOST_SHARE` or less than `LEAST_SHARE`. The median
    line and unknown lines get `USUAL_SHARE`. No contributor adds up more than all others together.
    """
    known = [line_bps for line_bps in lines_bps if 0 < line_bps < math.inf]
    if len(lines_bps) < 3 or not known:
        return (USUAL_SHARE,) * len(lines_bps)
    usual_bps = statistics.median_low(known)
    bounded = (min(line_bps / usual_bps, MOST_SHARE / USUAL_SHARE) for line_bps in lines_bps)
    shares = [max(LEAST_SHARE, round(USUAL_SHARE * ratio)) if ratio > 0 else USUAL_SHARE for ratio in bounded]
    return tuple(min(share, max(LEAST_SHARE, sum(shares) - share)) for share in shares)


def gathering(shares: Sequence[int], clusters: Sequence[int]) -> Floats:
    """Return an array [gatherer, owner] of shares of the whole vector: what the gatherer sums up, for its own cluster, of the
    parts that the owner settles."""
    share_N = np.asarray(shares, dtype=float) / sum(shares)
    labels_N = np.asarray(clusters)
    inside_NN = labels_N[:, None] == labels_N[None, :]
    turn_N = share_N / (inside_NN @ share_N)
    gathered_NN: Floats = np.where(inside_NN, np.diag(share_N), turn_N[:, None] * share_N[None, :])
    return gathered_NN


def crossing(shares: Sequence[int], clusters: Sequence[int]) -> Floats:
    """Return an array [from, to]: the share of the vector that each contributor sends to each other one, contributions and sums
    together."""
    gathered_NN = gathering(shares, clusters)
    labels_N: Indexes = np.asarray(clusters)
    each_N = gathered_NN.sum(axis=1)
    # Inside a cluster: contributions to the parts that the other gathers, and the sums of a peer's own parts.
    near_NN = each_N[None, :] + each_N[:, None]
    crossing_NN: Floats = np.where(labels_N[:, None] == labels_N[None, :], near_NN, gathered_NN + gathered_NN.T)
    np.fill_diagonal(crossing_NN, 0.0)
    return crossing_NN


def averaged_bytes(parameters: int, width: int, how: Averaging) -> float:
    """Estimate the encoded bytes of the gradients of `parameters` parameters, with the codec or the rank of `how`."""
    if how.rank:  # two factors for each matrix, taken to be of `width` x 4 `width`
        factors = how.rank * parameters * (1 + WIDENING) / (WIDENING * width)
        return 4.0 * min(parameters, factors / 2 if how.alternating else factors)
    if how.codec in SPARSE_CODECS:
        return payload_bytes(TensorInfo(how.codec, DType.FLOAT32, (parameters,), int(parameters * how.keep)))
    return encoded_bytes([TensorInfo(Codec.NONE, DType.FLOAT32, (parameters,))], Codec(how.codec))


@dataclass(frozen=True)
class ClusteredGroup:
    """A group with its clusters, the seconds that its averaging will take, and `flat_s`, the seconds without clusters."""

    group: Group
    seconds: float
    flat_s: float


def may_cluster(averaging: Averaging) -> bool:
    """Return whether averaging may go over clusters. Robust sums, and top-k's means over the contributors of each element,
    need each contribution by itself."""
    return not averaging.robust and averaging.codec != Codec.TOPK


def averaging_s(peer: PeerId, groups: Sequence[ClusteredGroup]) -> float:
    """Return the seconds that the averaging of all groups of `peer` takes, one group after another; 0 if it is in no group."""
    return sum(one.seconds for one in groups if any(member.peer == peer for member in one.group.members))


class AveragingClusters:
    """Clusters of members for averaging, chosen for each group of replicas. A group is identified by its blocks."""

    def __init__(self) -> None:
        self._chosen: dict[tuple[int, ...], tuple[tuple[PeerId, ...], Clusters]] = {}
        self._rests = 0

    def begin(self) -> None:
        """Begin another averaging: one fewer is left of those that must go without clusters after a failure."""
        self._rests = max(0, self._rests - 1)

    def give_up(self) -> None:
        """Forget all clusters after a failed averaging, whatever the cause, and average without clusters for the next `REST`
        averagings. Does nothing if no group averaged over several clusters."""
        if any(len(set(clusters)) > 1 for _, clusters in self._chosen.values()):
            self._rests = REST
            self._chosen.clear()

    def choose(
        self, group: Group, network: AveragingNetwork, size_bytes: float, *, allowed: bool = True
    ) -> ClusteredGroup:
        """Choose the fastest clusters and shares for averaging `group`. One cluster is used if fewer than `LEAST_MEMBERS`
        members contribute, the group averages nothing, an averaging over clusters failed lately, or `allowed` is false (see
        `may_cluster`). `network`: that of the group's members, in their order; `size_bytes`: the encoded bytes of its
        vector."""
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
        of = dict(zip(places, best, strict=True))
        for place in range(len(dealt.members)):  # a listener gets the cluster of the nearest contributor
            nearest = min(
                places, key=lambda other: (-network.path_bps_NN[other, place], network.delay_NN[other, place])
            )
            of.setdefault(place, of[nearest])
        members = (msgspec.structs.replace(member, cluster=of[place]) for place, member in enumerate(dealt.members))
        return ClusteredGroup(msgspec.structs.replace(dealt, members=tuple(members)), seconds, flat_s)


def is_bearable(group: Group, peer: PeerId, received_bps: Mapping[PeerId, float]) -> bool:
    """Return whether `peer`, by the rates it has measured (`received_bps`, bits/s), needs at most `UNBEARABLE` times as long
    over these clusters as without. True if it does not contribute or there is only one cluster."""
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
    """Return three candidates for how much of the vector each contributor adds up, relative to the others: the given ones
    (`by_line`), equal ones, and those that follow from the slowest outgoing path of each contributor."""
    slowest_N: Floats = np.where(np.eye(len(network.path_bps_NN), dtype=bool), np.inf, network.path_bps_NN).min(axis=1)
    return [tuple(by_line), (USUAL_SHARE,) * len(by_line), part_shares(slowest_N.tolist())]


def fastest(
    network: AveragingNetwork,
    size_bytes: float,
    sharings: Sequence[Shares],
    clusterings: Iterable[Clusters],
    before: Clusters,
) -> tuple[Clusters, float, Shares]:
    """Return the fastest clusters, the seconds of averaging over them, and the shares. The clusters `before` are kept unless
    others are at least `GAIN` times as fast."""
    found = {clusters: shared(network, size_bytes, sharings, clusters) for clusters in {before, *clusterings}}
    best = min(found, key=lambda clusters: (found[clusters][0], clusters))
    chosen = best if found[best][0] * GAIN <= found[before][0] else before
    return chosen, *found[chosen]


def shared(
    network: AveragingNetwork, size_bytes: float, sharings: Sequence[Shares], clusters: Clusters
) -> tuple[float, Shares]:
    """Return the least seconds over `clusters` and the shares that reach them; of equal ones the first of `sharings`."""
    return min(((network.averaging_s(size_bytes, shares, clusters), shares) for shares in sharings), key=itemgetter(0))


def _with_shares(group: Group, places: Sequence[int], shares: Shares) -> Group:
    of = dict(zip(places, shares, strict=True))
    members = (
        msgspec.structs.replace(member, share=of.get(place, member.share)) for place, member in enumerate(group.members)
    )
    return msgspec.structs.replace(group, members=tuple(members))


def _clusterings(network: AveragingNetwork, size_bytes: float) -> Iterator[Clusters]:
    """Yield the clusters at up to `LEVELS` scales: at least two, at most `MAX_CLUSTERS`, and fewer than contributors."""
    count = len(network.line_bps_N)
    cost_NN = 8 * size_bytes / count / network.path_bps_NN + network.delay_NN
    tree = dendrogram(np.maximum(cost_NN, cost_NN.T))
    for level in tree.levels(LEVELS):
        clusters = sorted(sorted(members) for members in tree.clusters(level))
        if 1 < len(clusters) <= min(MAX_CLUSTERS, count - 1):
            label = {place: number for number, members in enumerate(clusters) for place in members}
            yield tuple(label[place] for place in range(count))


WORTH = 1.25  # times the time of the usual line: a slow line may take this long
FEWEST, MOST = 1 / 8, 4.0  # times the run's share of elements that top-k keeps
SAMPLE = 1 << 16  # elements: the size for the comparison of codecs


@dataclass(frozen=True)
class Holder:
    """A replica that takes part. A replica that `listens` is behind the others and only receives what they agree on.
    `line_bps`: bits/s of its line; 0 if unknown."""

    peer: PeerId
    span: Span
    listens: bool = False
    line_bps: float = 0.0


Count = Callable[[PeerId, Sequence[int]], int]
"""(peer, units) -> the largest number of microbatches that `peer` has counted for one of `units`."""


def make_groups(
    units: int, run: Run, step: int, holders: Sequence[Holder], count: Count, codecs: Collection[int] = tuple(Codec)
) -> list[Group]:
    """Return the groups that average at the end of `step`. Layers with the same members and the same counts form one group;
    the parameters that both ends share form another one. Groups without members are left out. `codecs`: the codecs that the
    swarm allows."""
    how = _how(run, step)
    ordered = sorted(holders, key=lambda holder: holder.peer)
    by_members: dict[tuple[MemberSpec, ...], list[int]] = {}
    for unit in range(units):
        held_here = [holder for holder in ordered if holder.span.start <= unit < holder.span.end]
        members = _members(held_here, (unit,), how, count, run.averaging, codecs)
        by_members.setdefault(members, []).append(unit)
    ends = [holder for holder in ordered if holder.span.start == 0 or holder.span.end == units]
    shared_how = how if all(holder.span == Span(0, units) for holder in ends) else How.SUM
    groups = [(tuple(held), members, how) for members, held in by_members.items()]
    groups.append(((SHARED,), _members(ends, (0, units - 1), shared_how, count, run.averaging, codecs), shared_how))
    return [Group(number, *group) for number, group in enumerate(groups) if group[1]]


def _how(run: Run, step: int) -> How:
    """Return what the blocks of layers do at the end of `step`. Replicas that separate at random weights do not converge
    again, so gradients are summed in every step of the warm-up."""
    every = run.averaging.every
    if every == 1 or step < run.warmup_steps:
        return How.SUM
    return How.AVERAGE if (step + 1) % every == 0 or step + 1 == run.steps else How.APART


def _members(
    holders: Sequence[Holder],
    units: Sequence[int],
    how: How,
    count: Count,
    averaging: Averaging,
    codecs: Collection[int],
) -> tuple[MemberSpec, ...]:
    """Return the members of a group with counts, shares and forms. At an averaging, a replica that counted nothing in this
    step still counts as 1: it contributes its progress since the last averaging."""
    least = 1 if how is How.AVERAGE else 0
    taking = [holder for holder in holders if not (holder.listens and how is How.APART)]
    counts = [0 if holder.listens else max(least, count(holder.peer, units)) for holder in taking]
    lines = [holder.line_bps for holder, counted in zip(taking, counts, strict=True) if counted]
    shares = part_shares(lines)
    forms = line_forms(lines, shares, averaging, codecs) if averaging.by_line else [Form()] * len(lines)
    contributions = zip(shares, forms, strict=True)
    return tuple(_member(holder.peer, counted, contributions) for holder, counted in zip(taking, counts, strict=True))


def _member(peer: PeerId, count: int, contributions: Iterator[tuple[int, Form]]) -> MemberSpec:
    if not count:
        return MemberSpec(peer, 0)
    share, form = next(contributions)
    return MemberSpec(peer, count, share, form=form)


def line_forms(
    lines_bps: Sequence[float], shares: Sequence[int], averaging: Averaging, codecs: Collection[int]
) -> tuple[Form, ...]:
    """Return the form (codec and share of elements) of each contributor's values. `lines_bps`: bits/s, 0 if unmeasured;
    `shares`: how much each adds up, relative to the others; `codecs`: the codecs that the swarm allows. All get the run's
    form if the run does not choose by line or fewer than two lines are known; so do contributors whose line is the usual one
    or unknown.

    If the run's codec takes more than `WORTH` times the usual time on a line, the contributor gets the mildest codec that
    does not, or the strongest there is. With top-k the share of the elements follows from the line, so that all end
    together: BCRS (bandwidth-aware compression ratio scheduling, Tang et al., arXiv 2408.14736), within bounds.
    """
    usual = Form(averaging.codec, averaging.keep)
    known = [math.isfinite(line_bps) and line_bps > 0 for line_bps in lines_bps]
    loads = [1 + (len(shares) - 2) * share / sum(shares) for share in shares]
    times = [load / bps if is_known else 0.0 for load, bps, is_known in zip(loads, lines_bps, known, strict=True)]
    if not averaging.by_line or sum(known) < 2:
        return (usual,) * len(shares)
    usual_time = statistics.median_low(time for time, is_known in zip(times, known, strict=True) if is_known)
    slowness = [time / usual_time if is_known else 1.0 for time, is_known in zip(times, known, strict=True)]
    if averaging.codec in SPARSE_CODECS:
        return tuple(
            Form(averaging.codec, min(1.0, averaging.keep * min(MOST, max(FEWEST, 1 / slow)))) for slow in slowness
        )
    ladder = _ladder(averaging, codecs)
    return tuple(Form(_codec(ladder, slow), averaging.keep) for slow in slowness)


def codecs_by_line(averaging: Averaging, codecs: Collection[int]) -> tuple[Codec, ...]:
    """Return the run's codec and the codecs that slow lines may use instead, mildest first. Sparse codecs have no
    alternative."""
    return (Codec(averaging.codec),) if averaging.codec in SPARSE_CODECS else tuple(_ladder(averaging, codecs))


def _ladder(averaging: Averaging, codecs: Collection[int]) -> list[Codec]:
    """Return the run's codec and the stronger ones allowed. Robust sums compare contributions, and int4 is too noisy for
    that."""
    own = Codec(averaging.codec)
    strongest = Codec.INT8 if averaging.robust else Codec.INT4
    wanted = (codec for codec in LADDER if codec in codecs and _bytes(strongest) <= _bytes(codec) < _bytes(own))
    return [own, *wanted]


def _codec(ladder: Sequence[Codec], slowness: float) -> Codec:
    """Return the mildest codec that keeps a line of this `slowness` within `WORTH` times the usual time; else the strongest."""
    fitting = (codec for codec in ladder if slowness * _bytes(codec) <= WORTH * _bytes(ladder[0]))
    return next(fitting, ladder[-1])


def _bytes(codec: Codec) -> int:
    return encoded_bytes([TensorInfo(Codec.NONE, DType.FLOAT32, (SAMPLE,))], codec)
