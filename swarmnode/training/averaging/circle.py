"""Circle: the members that sum a group's vector, and their duties for each part of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from swarmnode.compute.training.averaging.parts import Forms, cut, longest_part, longest_part_in_turns
from swarmnode.net.interfaces import PeerId

Heard = Callable[[PeerId, slice, Tensor], None]
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
    heard: Heard | None = None

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
    that it adds up. `contributes`: its values of others' parts, by gatherer. `takes`: parts whose sums it receives, by
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
        self.takes: dict[PeerId, list[tuple[int, slice]]] = {}
        self.hands_on: dict[PeerId, list[int]] = {other: [] for other in self.neighbours}
        parts = cut(length, circle.shares, [circle.cluster_of(owner) for owner in owners])
        for number, part in enumerate(parts):
            gatherers = {cluster: owners[place] for cluster, place in part.gatherers.items()}
            self._note(number, part.place, owners[part.owner], gatherers, contributes=peer in circle.weights)

    @property
    def owners(self) -> list[PeerId]:
        """The owners that receive its cluster's sums, because other clusters contribute to their parts as well; perhaps itself."""
        return list(dict.fromkeys(part.owner for part in self.gathers if not part.is_whole))

    def _note(
        self, number: int, place: slice, owner: PeerId, gatherers: Mapping[int, PeerId], *, contributes: bool
    ) -> None:
        gatherer = gatherers[self._cluster]
        if gatherer != self._peer:
            self.takes.setdefault(gatherer, []).append((number, place))
            if contributes:
                self.contributes.setdefault(gatherer, []).append((number, place))
            return
        elsewhere = tuple(other for other in gatherers.values() if other != owner)
        self.gathers.append(GatheredPart(number, place, owner, elsewhere))
        if owner != self._peer:
            self.takes.setdefault(owner, []).append((number, place))
        for receiver in (*self.neighbours, *(elsewhere if owner == self._peer else ())):
            self.hands_on.setdefault(receiver, []).append(number)
