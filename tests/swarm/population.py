"""A made-up swarm as it lies in the DHT: who stands where, by the true numbers of peers."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from swarmnode.net.interfaces import PeerId
from swarmnode.swarm.peers import shards
from swarmnode.swarm.peers.shards import ALL, LARGE, SAMPLE, Shard

Span = tuple[int, int]


class Population:
    """Peers by id, with their spans."""

    def __init__(self, spans: Mapping[PeerId, Span]) -> None:
        self.spans = spans
        self.sizes = Counter(place for span in spans.values() for place in shards.places_of(span))
        self.at: dict[Shard, list[PeerId]] = defaultdict(list)
        for peer, span in spans.items():
            for shard in self.stands(peer, span):
                self.at[shard].append(peer)

    @classmethod
    def draw(cls, peers: int, units: int, *, widths: Iterable[int] = (4, 8, 8, 12), seed: int = 0) -> Population:
        """Spans of the given widths, anywhere in the model."""
        dice = random.Random(seed)
        choices = [min(width, units) for width in widths]
        spans: dict[PeerId, Span] = {}
        for number in range(peers):
            width = dice.choice(choices)
            start = dice.randrange(units - width + 1)
            spans[f"peer {seed} {number}"] = (start, start + width)
        return cls(spans)

    def stands(self, peer: PeerId, span: Span) -> list[Shard]:
        """Where a peer that knows the true numbers writes."""
        peers = len(self.spans)
        own = [SAMPLE] if shards.is_in_sample(peer, peers) else []
        if peers < LARGE:
            own.append(shards.own_shard(ALL, peer, peers))
        else:
            own += [shards.own_shard(place, peer, self.sizes[place]) for place in shards.places_of(span)]
        return list(dict.fromkeys(own))
