"""Shards: the DHT keys of a swarm's announcements, and the sampling that estimates the swarm's size.

A store rewrites a key's whole dictionary, so a key should hold about 100 peers at most. Announcements lie at places.
Every place is split into 2^L shards by the first bits of the peers' digests; the level L depends on the number of peers
at the place.

A small swarm has one place, ALL, where every peer reads everything. In a large swarm that is too much: a place is then
a range of 8 layers, and a peer is stored at every range that its span touches. A span over more than 4 ranges, and a
peer without layers, are stored at WIDE. So a reader finds all holders of a layer at two places, however large the swarm
is.

The SAMPLE, which is ALL at level 0, is one key that always has about 64 peers: those with the smallest digests, in a
small swarm all. A newcomer reads it and derives the size of the swarm from the density of the digests.

Every peer estimates sizes from its own reads, so near a threshold two peers may differ. Therefore readers then read two
levels, and writers write to both.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from swarmnode.net.interfaces import PeerId, Record, key_digest
from swarmnode.swarm.records.announcement import Announcement, peer_digest

PEERS_PER_SHARD = 64
MAX_LEVEL = 10  # 1,024 shards: 65,536 peers at one place
RANGE_UNITS = 8
MAX_RANGES = 4  # of one peer: more stores cost too much
LARGE = 256  # peers in the smallest swarm that counts as large
UNCERTAINTY = 1.5  # two peers' estimates of the same number may differ by this factor
WHOLE = 96  # up to this many peers a place is read whole, at all levels that its peers may use
WHOLE_LEVELS = 3
NEWEST = 0.5  # weight of a newer size
SAMPLE_EVERY = 8  # reads
THOROUGH_EVERY = 16  # reads of a large swarm: data that one keeper withholds comes from another
CALM_THOROUGH_EVERY = 4  # reads of a small, calm swarm: newcomers are seen by then at the latest
GROWTH = 2.0  # between two reads of the sample, once the size was known

ALL, WIDE = "all", "wide"

Place = str
"""ALL, WIDE, or the number of a range of units."""


class Shard(NamedTuple):
    """Key in the DHT for a part of the announcements: a number at a level of a place (a range of layers)."""

    place: Place
    level: int
    number: int

    def key(self, swarm_id: bytes) -> bytes:
        """Return this shard's key in the DHT, for the swarm with this id."""
        if self.place == ALL:
            return b"%b:peers:%d:%d" % (swarm_id, self.level, self.number)
        return b"%b:units:%b:%d:%d" % (swarm_id, self.place.encode(), self.level, self.number)


SAMPLE = Shard(ALL, 0, 0)


@lru_cache(maxsize=4096)
def homes(swarm_id: bytes, peer: PeerId, places: tuple[Place, ...]) -> frozenset[bytes]:
    """Return the digests of all DHT keys under which a peer at these places may announce itself, for any estimate of the swarm's
    size."""
    shards = [
        Shard(place, level, _number(peer, level)) for place in (ALL, WIDE, *places) for level in range(MAX_LEVEL + 1)
    ]
    return frozenset(key_digest(shard.key(swarm_id)) for shard in shards)


def level_for(peers: float) -> int:
    """Return the level of a place with `peers` peers: shards then hold at most 64 on average, unless the level is the
    highest."""
    level = 0
    while level < MAX_LEVEL and peers > PEERS_PER_SHARD << level:
        level += 1
    return level


def places(units: int) -> list[Place]:
    """Return the places (WIDE and the ranges of layers) that announcements in a large swarm are stored under, for a model of
    `units` layers."""
    return [WIDE, *(str(number) for number in range(-(-units // RANGE_UNITS)))]


def places_of(span: tuple[int, int]) -> list[Place]:
    """Return the places (ranges of layers) that a peer's announcement is stored under in a large swarm."""
    if span[0] >= span[1]:
        return [WIDE]
    first, last = span[0] // RANGE_UNITS, (span[1] - 1) // RANGE_UNITS
    return [WIDE] if last - first >= MAX_RANGES else [str(number) for number in range(first, last + 1)]


def own_shard(place: Place, peer: PeerId, peers: float) -> Shard:
    """Return the key that the announcement of `peer` is stored under, at a place of about `peers` peers."""
    level = level_for(peers)
    return Shard(place, level, _number(peer, level))


def _number(peer: PeerId, level: int) -> int:
    return int.from_bytes(peer_digest(peer)[:2], "big") >> (16 - level)


def all_shards(place: Place, peers: float) -> list[Shard]:
    """Return all parts of the DHT's directory that may list the peers of a place, if these are about `peers`. The number of parts
    grows with the number of peers."""
    levels = range(level_for(peers / UNCERTAINTY), level_for(peers * UNCERTAINTY) + 1)
    return [Shard(place, level, number) for level in levels for number in range(1 << level)]


def is_in_sample(peer: PeerId, peers: float) -> bool:
    """Return whether `peer` is among the about 64 peers of the sample in a swarm of about `peers` peers."""
    return digest_share(peer) * peers <= PEERS_PER_SHARD


def digest_share(peer: PeerId) -> float:
    """Return the share of all digests that are smaller than the peer's."""
    return int.from_bytes(peer_digest(peer), "big") / (1 << 64)


def peers_from_sample(sample: Collection[PeerId]) -> float:
    """Estimate the number of peers in a swarm whose sample holds these peers: the denser their digests, the more peers.

    The median digest decides: the largest ones are there by other peers' estimates. A sample of fewer than 32 peers
    counts as the swarm.
    """
    if len(sample) < PEERS_PER_SHARD // 2:
        return len(sample)
    shares = sorted(map(digest_share, sample))
    middle = len(shares) // 2
    return max(float(len(sample)), middle / shares[middle - 1])


EnoughAt = Callable[[Shard, Mapping[bytes, Record]], bool]
"""Function of (shard, records found there) that returns whether no more of its keepers need to be asked."""


class ShardSampling:
    """Estimates of a swarm's size and of its places. `units` is the number of layers of the model, as far as seen."""

    def __init__(self, peer: PeerId, units: int = 0) -> None:
        self.units = units
        self.peers = 0.0
        self.population = 0.0  # peers of the DHT; 0 if never asked
        self._sizes: dict[Place, float] = {}  # of places that were read
        self._visits: Counter[Place] = Counter()
        self._misses: Counter[Place] = Counter()  # consecutive reads without a peer
        self._spans: list[tuple[int, int]] = []  # of the peers in the sample, which is unbiased
        self._peers_by_shard: dict[Shard, frozenset[PeerId]] = {}  # peers at each shard's last read
        self._random = random.Random(peer)
        self._reads = 0

    @property
    def large(self) -> bool:
        """Whether the swarm is too large to read everything."""
        return self.peers >= LARGE

    def enough(self, living: Collection[PeerId], fresh_until: float, *, calm: bool) -> EnoughAt | None:
        """Return the condition that ends the next read before all keepers are asked; None if all must be asked.

        In a large swarm the first answer is enough. In a small and calm swarm a read ends once each shard has, for
        every living peer of its last read, a record that is valid until `fresh_until` at least.
        """
        if self._reads % (THOROUGH_EVERY if self.large else CALM_THOROUGH_EVERY) == 0:
            return None
        if self.large:
            return lambda _shard, records: bool(records)
        if not calm:
            return None
        awaited = {
            shard: {peer.encode() for peer in peers.intersection(living)}
            for shard, peers in self._peers_by_shard.items()
        }

        def are_fresh(shard: Shard, records: Mapping[bytes, Record]) -> bool:
            fresh = {subkey for subkey, record in records.items() if record.expires_at >= fresh_until}
            return bool(awaited.get(shard)) and awaited[shard] <= fresh

        return are_fresh

    def is_in_doubt(self, by_shard: Mapping[Shard, Sequence[Announcement]]) -> bool:
        """Return whether a read makes the swarm look so large that the DHT should be asked for its size."""
        if SAMPLE not in by_shard:
            return False
        claimed = peers_from_sample([peer.peer for peer in by_shard[SAMPLE]])
        return claimed >= PEERS_PER_SHARD and claimed > UNCERTAINTY * self._count_all(by_shard)

    @staticmethod
    def _count_all(by_shard: Mapping[Shard, Sequence[Announcement]]) -> float:
        return float(len({peer.peer for shard, records in by_shard.items() if shard.place == ALL for peer in records}))

    # -- reading

    def next_shards(self, span: tuple[int, int]) -> list[Shard]:
        """Return the shards (keys of the DHT with announcements) to read now. `span` is the range of layers of this peer."""
        self._reads += 1
        if not self.large:
            return list(dict.fromkeys([SAMPLE, *all_shards(ALL, self.peers)]))
        if self._reads % SAMPLE_EVERY == 0:
            return [SAMPLE]
        own = places_of(span)
        others = [place for place in places(self.units) if place not in own]
        # the place to visit next is drawn among the least visited ones; visits without a peer count more
        able = others if others and self._reads % 2 else own
        turns = {place: self._visits[place] + 2 * self._misses[place] for place in able}
        least = min(turns.values())
        place = self._random.choice([place for place, visits in turns.items() if visits == least])
        self._visits[place] += 1
        # All shards of a small place, unless the last read found no peer; else one at random, or one at each possible level.
        size, misses = self.size(place), self._misses[place]
        if size <= WHOLE and not misses:
            return _small(place)
        level, spread = level_for(size), 0 if place in self._sizes else 1 + misses
        levels = range(max(0, level - spread), min(MAX_LEVEL, level + spread) + 1)
        return [Shard(place, level, self._random.randrange(1 << level)) for level in levels]

    def whole(self, place: Place) -> list[Shard]:
        """Return all shards of a place, for a caller that must know all holders of a layer. There may be many."""
        if not self.large:
            return self.next_shards((0, 0))
        size = self.size(place)
        return _small(place) if size <= WHOLE else all_shards(place, size)

    def size(self, place: Place) -> float:
        """Return the number of peers at a place: as read, else estimated from the spans in the sample."""
        if place in self._sizes:
            return self._sizes[place]
        here = sum(place in places_of(span) for span in self._spans)
        return self.peers * here / max(1, len(self._spans))

    def saw(self, by_shard: Mapping[Shard, Sequence[Announcement]]) -> None:
        """Update the estimates of the swarm's size from the announcements found in shards."""
        everybody = {peer.peer: peer for records in by_shard.values() for peer in records}
        self.units = max([self.units, *(peer.span[1] for peer in everybody.values())])
        self._peers_by_shard.update(
            {shard: frozenset(peer.peer for peer in records) for shard, records in by_shard.items()}
        )
        if SAMPLE in by_shard:
            counted = self._count_all(by_shard)
            claimed = peers_from_sample([peer.peer for peer in by_shard[SAMPLE]])
            if self.is_in_doubt(by_shard):  # a stranger can try out identities until they make the sample dense
                claimed = min(claimed, self.population * UNCERTAINTY)
            if self.peers >= PEERS_PER_SHARD:  # a single read must not raise the estimate much
                claimed = min(claimed, self.peers * GROWTH)
            self.peers = max(counted, claimed)
            self._spans = [peer.span for peer in by_shard[SAMPLE]]
            if not self.large:
                self._sizes.clear()
        for place in {shard.place for shard in by_shard} - {ALL}:
            self._count({shard: records for shard, records in by_shard.items() if shard.place == place}, place)

    def _count(self, by_shard: Mapping[Shard, Sequence[Announcement]], place: Place) -> None:
        """Update the estimated number of peers in a place (a range of layers) from the announcements `by_shard` in some of its
        shards. A place at level n has 2^n shards. Peers that estimate differently use different levels, so all levels add up."""
        by_level: dict[int, list[int]] = {}
        for shard, records in by_shard.items():
            by_level.setdefault(shard.level, []).append(len(records))
        size = sum(sum(counts) / len(counts) * (1 << level) for level, counts in by_level.items())
        if size:
            before = self._sizes.get(place, size)
            self._sizes[place] = before + NEWEST * (size - before)
            self._misses[place] = 0
        else:
            self._sizes.pop(place, None)
            self._misses[place] += 1

    # -- writing

    def own_shards(self, peer: PeerId, span: tuple[int, int]) -> list[Shard]:
        """Return the shards where `peer`, with the layers `span`, announces itself; near the threshold those of a small and of a
        large swarm."""
        own = [SAMPLE] if is_in_sample(peer, self.peers) else []
        if self.peers < LARGE * UNCERTAINTY:
            own.append(own_shard(ALL, peer, self.peers))
        if self.peers > LARGE / UNCERTAINTY:
            own += [own_shard(place, peer, self.size(place)) for place in places_of(span)]
        return list(dict.fromkeys(own))


def _small(place: Place) -> list[Shard]:
    """Return all shards of the levels that peers of a small place may use."""
    return [Shard(place, level, number) for level in range(WHOLE_LEVELS) for number in range(1 << level)]
