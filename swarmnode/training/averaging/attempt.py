"""Attempt: one attempt of an all-reduce, as one member runs it, and the sums that the member passes on.

A round's vector is cut into parts, each owned by a contributor. Three jobs run at the same time, each at the pace of its
receivers:

    contribute   send this member's values of others' parts to their owners;
    settle       add up its own parts in the order of the contributors, and send the sums to all members;
    take         receive the settled parts of others.

If members are in clusters, an owner receives only one sum from each cluster (inside, then between, then back). In each
cluster the members take turns as gatherers: the gatherer of a part adds it up, and receives the owner's sum for its whole
cluster. A member waits only for work on the same part or an earlier one, so there is no deadlock.

Besides the vectors, a member's memory is bounded by the windows (`partner.py`), whatever the vectors' length.

Circle: the members that sum a group's vector, and their duties for each part of it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, Union

import msgspec
from torch import Tensor

from swarmnode.codec.training_messages import MAX_PULLED, Part
from swarmnode.compute.training.averaging.gradient_compressor import Round
from swarmnode.compute.training.averaging.parts import (
    Contribution,
    Encoded,
    Forms,
    cut,
    longest_part,
    longest_part_in_turns,
    reduce_part,
)
from swarmnode.errors import blaming
from swarmnode.links.switchboard import Switchboard
from swarmnode.net.clock import Deadline
from swarmnode.net.interfaces import PeerId
from swarmnode.net.tasks import Tasks
from swarmnode.training.averaging.partner import AttemptId, EarlyPulls, PartChunk, Partner, Patience

OnContribution = Callable[[PeerId, slice, Tensor], None]
"""Callback (contributor, stretch, values) for contributions that are gathered here."""


@dataclass(frozen=True)
class Circle:
    """The members that sum one group's vector.

    `length`: largest number of elements of the vector. `weights`: of the contributors, in their order; `shares`: how much of the
    vector each adds up. `clusters`: of all members; empty for a single one. `forms`: encodings of the values if lines decide them.
    `robust`: the sum is clipped, so that no contributor drags it away. `warm_start`: all members have the factors of the last sum.
    """

    group: int
    length: int
    members: tuple[PeerId, ...]
    weights: Mapping[PeerId, float]
    shares: tuple[int, ...]
    clusters: Mapping[PeerId, int] = field(default_factory=dict)
    forms: Forms | None = None
    robust: bool = False
    warm_start: bool = False
    on_contribution: OnContribution | None = None

    @property
    def longest_part(self) -> int:
        """Largest number of elements of the vector that are sent in one message."""
        sizes = Counter(map(self.cluster_of, self.weights))
        return (
            longest_part_in_turns(self.length, list(sizes.values())) if len(sizes) > 1 else longest_part(sizes.total())
        )

    def cluster_of(self, peer: PeerId) -> int:
        """Return the number of the cluster that a member belongs to; 0 if it is not listed."""
        return self.clusters.get(peer, 0)

    def weight_near(self, peer: PeerId) -> float:
        """Return the weight of all contributors in a member's cluster."""
        here = self.cluster_of(peer)
        return sum(weight for other, weight in self.weights.items() if self.cluster_of(other) == here)


@dataclass(frozen=True)
class GatheredPart:
    """A part that a member gathers from its cluster. The `owner` adds up the clusters' sums; `elsewhere` are the gatherers of
    the clusters other than the owner's."""

    number: int
    place: slice
    owner: PeerId
    elsewhere: tuple[PeerId, ...]

    @property
    def is_whole(self) -> bool:
        """Whether all contributions to the part come from one cluster of members."""
        return not self.elsewhere


class Duties:
    """The duties of one member in a round of `length` elements, all in the order of the parts.

    `adds_up`: the contributors of its cluster, in their order; `contributors`: the same without itself. `gathers`: parts
    that it adds up. `contributes`: its values of others' parts, by gatherer. `receives`: parts whose sums it receives, by
    sender. `hands_on`: numbers of parts whose sums it sends, by receiver.
    """

    def __init__(self, circle: Circle, peer: PeerId, length: int) -> None:
        self._peer = peer
        self._cluster = circle.cluster_of(peer)
        owners = tuple(circle.weights)
        self.neighbours = [
            other for other in circle.members if other != peer and circle.cluster_of(other) == self._cluster
        ]
        self.adds_up = [other for other in circle.weights if circle.cluster_of(other) == self._cluster]
        self.contributors = [other for other in self.adds_up if other != peer]
        self.gathers: list[GatheredPart] = []
        self.contributes: dict[PeerId, list[tuple[int, slice]]] = {}
        self.receives: dict[PeerId, list[tuple[int, slice]]] = {}
        self.hands_on: dict[PeerId, list[int]] = {other: [] for other in self.neighbours}
        parts = cut(length, circle.shares, [circle.cluster_of(owner) for owner in owners])
        for number, part in enumerate(parts):
            gatherers = {cluster: owners[place] for cluster, place in part.gatherers.items()}
            self._record(number, part.place, owners[part.owner], gatherers, contributes=peer in circle.weights)

    @property
    def owners(self) -> list[PeerId]:
        """The owners that receive its cluster's sums, because other clusters contribute to their parts as well; perhaps itself."""
        return list(dict.fromkeys(part.owner for part in self.gathers if not part.is_whole))

    def _record(
        self, number: int, place: slice, owner: PeerId, gatherers: Mapping[int, PeerId], *, contributes: bool
    ) -> None:
        gatherer = gatherers[self._cluster]
        if gatherer != self._peer:
            self.receives.setdefault(gatherer, []).append((number, place))
            if contributes:
                self.contributes.setdefault(gatherer, []).append((number, place))
            return
        elsewhere = tuple(other for other in gatherers.values() if other != owner)
        self.gathers.append(GatheredPart(number, place, owner, elsewhere))
        if owner != self._peer:
            self.receives.setdefault(owner, []).append((number, place))
        for receiver in (*self.neighbours, *(elsewhere if owner == self._peer else ())):
            self.hands_on.setdefault(receiver, []).append(number)


T = TypeVar("T")
Gathered = Union[Encoded, Contribution]
Parts = asyncio.Queue[Union[tuple[GatheredPart, Gathered], None]]
"""Parts that a cluster has added up for one owner; None at the end."""

STILL = Deadline(floor_s=4.0, ceiling_s=20.0, slack=8.0)  # for a partner that neither acts nor sends excuses
EXCUSE_S = STILL.floor_s / 4
EXCUSES = 6  # times as long for a partner that says it is waiting: the peer that it waits for is found before
UNKNOWN_RTT_S = 0.5
SLOWEST_BYTES_PER_S = 32 * 1024  # as for any payload (`links/pacing.py`)
RECEIVED_BYTES = 24 << 20  # of chunks pulled from all partners together
WINDOW = 8  # chunks of each kind that a partner may have on the way: 1 Gbit/s at 60 ms
SETTLED_AHEAD = 2  # least number of parts that may wait for the slowest member or for their owner


Call = Callable[[Callable[[], Any]], "asyncio.Future[Any]"]
"""Function that runs another one on the tensors' thread."""


@dataclass(frozen=True)
class _Work:
    """State of one member in a round of an all-reduce.

    `gathered` has its cluster's sums, by owner, of the parts that other clusters contribute to as well.
    """

    circle: Circle
    duties: Duties
    round: Round
    of: Part
    sums: OutgoingSums
    gathered: Mapping[PeerId, Parts]

    def head(self, part: int, *, agreed: bool = False) -> Part:
        """Return the header of the message for a part; `agreed` marks the final sum."""
        return msgspec.structs.replace(self.of, part=part, agreed=agreed)


class OutgoingSums:
    """The sums of one round that a member passes on, each kept until its slowest receiver has taken it.

    `parts`: their numbers. Each of the `receivers` takes its own parts in this order.

    At most `ahead` sums are kept, counted from the first that some receiver still lacks. If several clusters agree on
    parts, sums arrive in any order; a receiver that waits for the first one is never blocked by later ones.
    """

    def __init__(self, parts: Sequence[int], receivers: Mapping[str, Iterable[int]], ahead: int) -> None:
        self._place = {number: place for place, number in enumerate(parts)}
        self._parts = parts
        self._missing = Counter(number for numbers in receivers.values() for number in numbers)
        self._ahead = ahead
        self._first = 0  # place of the first part that a receiver lacks
        self._sums: dict[int, Encoded] = {}
        self._changed = asyncio.Condition()

    def hands_on(self, part: int) -> bool:
        """Return whether this member passes on the sum of a part."""
        return part in self._place

    async def put(self, part: int, settled: Encoded) -> None:
        """Pass on the sum `settled` of a part, after waiting until there is room for it."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._place[part] < self._first + self._ahead)
            self._sums[part] = settled
            self._advance()

    async def get(self, part: int) -> Encoded:
        """Wait until the sum of `part` is known, and return it encoded."""
        async with self._changed:
            await self._changed.wait_for(lambda: part in self._sums)
            return self._sums[part]

    async def mark_sent(self, part: int) -> None:
        """Record that one more receiver has taken a part."""
        async with self._changed:
            self._missing[part] -= 1
            self._advance()

    def _advance(self) -> None:
        """Drop the sums that all receivers have, from the first part on."""
        while self._first < len(self._parts):
            part = self._parts[self._first]
            if part not in self._sums or self._missing[part] > 0:
                break
            del self._sums[part]
            self._first += 1
        self._changed.notify_all()


@dataclass(eq=False)
class Attempt:
    """An attempt at an all-reduce. It is a context: vectors are summed inside it. `circles`: those of `peer` with other members."""

    peer: PeerId
    attempt: AttemptId
    switchboard: Switchboard
    call: Call
    circles: Sequence[Circle]
    early: EarlyPulls

    def __post_init__(self) -> None:
        self._sources = {source for circle in self.circles for source in circle.weights} - {self.peer}
        self._longest = max((circle.longest_part for circle in self.circles), default=1)
        members = {member for circle in self.circles for member in circle.members} - {self.peer}
        self.partners = {
            member: Partner(self.peer, member, self.attempt, partial(self._patience, member)) for member in members
        }
        for member, partner in self.partners.items():
            pull = self.early.pop_pull(member, self.attempt)
            if pull is not None:
                partner.pulled(*pull)
        # Without excuses partners lose patience, and another attempt is made.
        self._tasks = Tasks("all-reduce", on_crash=None)

    def __repr__(self) -> str:
        return f"<Attempt {self.attempt} with {list(self.partners.values())}>"

    @property
    def _chunk_bytes(self) -> int:
        return 4 * self._longest

    @property
    def window(self) -> int:
        """Number of chunks of each kind that each partner may have on the way to us."""
        return max(1, min(WINDOW, MAX_PULLED, RECEIVED_BYTES // (2 * self._chunk_bytes * max(1, len(self._sources)))))

    def _patience(self, peer: PeerId) -> Patience:
        """Return the patience with a partner: how long to wait for it, as its parts share its link with those of all other
        members."""
        still_s = STILL.wait_s(rtt_s=self.switchboard.rtt_s(peer) or UNKNOWN_RTT_S)
        slowest_s = self._chunk_bytes * len(self.partners) / SLOWEST_BYTES_PER_S
        return Patience(still_s, EXCUSES * still_s + slowest_s)

    async def __aenter__(self) -> Attempt:
        self._tasks.spawn(self._excuse(), "excuses")
        try:
            await self._together(self.partners[peer].pull(self.switchboard, self.window) for peer in self._sources)
        except BaseException as error:
            await self.__aexit__(type(error), error, None)
            raise
        return self

    async def __aexit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        for partner in self.partners.values():
            partner.close(error)
        await self._tasks.close()

    async def _excuse(self) -> None:
        """Tell all partners, again and again, that we wait for others. It uses the compute thread, and so stops if that
        thread stands still."""
        while True:
            await asyncio.sleep(EXCUSE_S)
            await self.call(lambda: None)
            for partner in self.partners.values():
                waits = [(partner.progress.waiting_since_s, peer) for peer, partner in self.partners.items()]
                began = [(since_s, peer) for since_s, peer in waits if since_s is not None]
                partner.excuse(min(began, default=(0.0, ""))[1])  # that we have waited for the longest

    async def sum(self, circle: Circle, number: int, round_: Round) -> None:
        """Sum a round's vector with the other members of a circle. Raises PeerError that names the failed peer, ProtocolError."""
        duties = Duties(circle, self.peer, len(round_))
        ahead = max(SETTLED_AHEAD, self.window)
        work = _Work(
            circle,
            duties,
            round_,
            Part(circle.group, number, 0, False, (), self.attempt.run),
            OutgoingSums([part.number for part in duties.gathers], duties.hands_on, ahead),
            {owner: asyncio.Queue(ahead) for owner in duties.owners},
        )
        await self._together(
            [
                *(self._contribute(work, gatherer) for gatherer in duties.contributes),
                self._gather(work),
                *(
                    self._finish(work) if owner == self.peer else self._push_partials(work, owner)
                    for owner in duties.owners
                ),
                *(self._receive_sums(work, source) for source in duties.receives),
                *(self._push_sums(work, receiver) for receiver in duties.hands_on),
            ]
        )

    async def _contribute(self, work: _Work, gatherer: PeerId) -> None:
        for part, place in work.duties.contributes[gatherer]:
            offer = await self._run(partial(work.round.offer, place))
            await self.partners[gatherer].push(work.head(part), offer)

    async def _gather(self, work: _Work) -> None:
        """Add up our cluster's contributions to the parts that we gather; if there is one cluster, these are the sums."""
        for part in work.duties.gathers:
            head = work.head(part.number)
            chunks = {peer: await self.partners[peer].next(head) for peer in work.duties.contributors}
            if part.is_whole:
                settled = await self._run(partial(self._settle, work, part, chunks))
                await work.sums.put(part.number, settled)
            else:
                gathered = await self._run(partial(self._add_up, work, part, chunks))
                await work.gathered[part.owner].put((part, gathered))
            for peer in work.duties.contributors:
                self.partners[peer].grant_next(agreed=False)
        for queue in work.gathered.values():
            await queue.put(None)

    def _settle(self, work: _Work, part: GatheredPart, chunks: Mapping[PeerId, PartChunk]) -> Encoded:
        """Settle a part on the tensors' thread. All members, ourselves included, take the same bytes."""
        settled = work.round.settle(part.place, self._accept(work, part, chunks))
        work.round.write_settled(part.place, *settled)
        return settled

    def _add_up(self, work: _Work, part: GatheredPart, chunks: Mapping[PeerId, PartChunk]) -> Gathered:
        """Add up our cluster's contributions to a part: encoded for another owner, plain for ourselves."""
        heard = self._accept(work, part, chunks)
        if part.owner != self.peer:
            return work.round.settle(part.place, heard)
        return Contribution(sum(one.weight for one in heard), reduce_part(heard))

    def _accept(self, work: _Work, part: GatheredPart, chunks: Mapping[PeerId, PartChunk]) -> list[Contribution]:
        """Return the contributions of our cluster's members, in their order. Raises ProtocolError that names the peer whose
        chunk is invalid."""
        heard: list[Contribution] = []
        for peer in work.duties.adds_up:
            with blaming(peer):
                offer = work.round.offer(part.place) if peer == self.peer else chunks[peer].encoded
                heard.append(work.round.accept(part.place, work.circle.weights[peer], *offer))
            if work.circle.on_contribution is not None:
                for stretch, values_M in work.round.in_vector(part.place, heard[-1].values_N):
                    work.circle.on_contribution(peer, stretch, values_M)
        return heard

    async def _finish(self, work: _Work) -> None:
        """Settle the parts of this peer that other clusters contribute to: add the sum of its own cluster and the sums of the
        others."""
        while (next_ := await work.gathered[self.peer].get()) is not None:
            part, own = next_
            assert isinstance(own, Contribution)
            head = work.head(part.number)
            chunks = {peer: await self.partners[peer].next(head) for peer in part.elsewhere}
            settled = await self._run(partial(self._join, work, part, own, chunks))
            await work.sums.put(part.number, settled)
            for peer in part.elsewhere:
                self.partners[peer].grant_next(agreed=False)

    def _join(self, work: _Work, part: GatheredPart, own: Contribution, chunks: Mapping[PeerId, PartChunk]) -> Encoded:
        """Return the agreed sum of `part`, encoded: our own cluster's sum `own` plus those of the other clusters, in their
        order."""
        heard = [own]
        for peer in part.elsewhere:
            with blaming(peer):
                heard.append(work.round.accept(part.place, work.circle.weight_near(peer), *chunks[peer].encoded))
        settled = work.round.settle(part.place, heard)
        work.round.write_settled(part.place, *settled)
        return settled

    async def _push_partials(self, work: _Work, owner: PeerId) -> None:
        while (next_ := await work.gathered[owner].get()) is not None:
            part, gathered = next_
            assert not isinstance(gathered, Contribution)
            await self.partners[owner].push(work.head(part.number), gathered)

    async def _receive_sums(self, work: _Work, source: PeerId) -> None:
        """Receive the agreed sums of the parts that `source` settles, and write them into the vector. Those that members of our
        cluster await from this peer are passed on unchanged."""
        partner = self.partners[source]
        for part, place in work.duties.receives[source]:
            chunk = await partner.next(work.head(part, agreed=True))
            with blaming(source):
                await self._run(partial(work.round.write_settled, place, *chunk.encoded))
            if work.sums.hands_on(part):
                await work.sums.put(part, chunk.encoded)
            partner.grant_next(agreed=True)

    async def _push_sums(self, work: _Work, receiver: PeerId) -> None:
        for part in work.duties.hands_on[receiver]:
            await self.partners[receiver].push(work.head(part, agreed=True), await work.sums.get(part))
            await work.sums.mark_sent(part)

    async def _run(self, function: Callable[[], T]) -> T:
        result: T = await self.call(function)
        return result

    async def _together(self, jobs: Iterable[Coroutine[Any, Any, None]]) -> None:
        """Run the jobs concurrently. The first error ends all of them and is raised."""
        tasks = Tasks("all-reduce", on_crash=None)
        try:
            await asyncio.gather(*[tasks.spawn(job, "job", awaited=True) for job in jobs])
        finally:
            await tasks.close()
