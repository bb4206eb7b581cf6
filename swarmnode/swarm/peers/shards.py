"""Shards: the DHT keys under which a swarm's announcements lie, and the sampling of them by which its size is known.

A store rewrites a key's whole dictionary, so a key should hold at most some 100 peers. Announcements lie at places, and
every place is cut into 2^L shards by the first bits of the peers' digests, at the level L that its number of peers asks for.

A small swarm has one place, ALL, where everybody reads everything. In a large one nobody can: a place is then a range of 8
units, and a peer stands at every range that its span touches. A span over more than 4 ranges, and a peer that holds
nothing, stands at WIDE. So who wants the holders of a unit reads two places, however large the swarm is.

The SAMPLE, which is ALL at level 0, is one key that always has some 64 peers: those of the smallest digests, in a small swarm
all. A newcomer reads it and knows how large the swarm is, from how dense the digests lie.

Everybody works out sizes from what it has read, so near a threshold two peers may differ: readers then read two levels,
and writers write to both.
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
MAX_RANGES = 4  # of one peer: more stores than this cost too much
LARGE = 256  # peers from which on a swarm is large
UNCERTAINTY = 1.5  # two peers' estimates of the same number may differ by this factor
WHOLE = 96  # peers up to which a place is read whole, at all levels that its peers may be at
WHOLE_LEVELS = 3
NEWEST = 0.5  # weight of a newer size
SAMPLE_EVERY = 8  # reads
THOROUGH_EVERY = 16  # reads of a large swarm: what one keeper holds back, another gives
CALM_THOROUGH_EVERY = 4  # of a small one in which nothing moves: who is new is seen by then at the latest
GROWTH = 2.0  # between two looks at the sample, once the size was known

ALL, WIDE = "all", "wide"

Place = str
"""ALL, WIDE, or the number of a range of units"""


class Shard(NamedTuple):
    """One key: a part of a place."""

    place: Place
    level: int
    number: int

    def key(self, swarm_id: bytes) -> bytes:
        """As the DHT has it."""
        if self.place == ALL:
            return b"%b:peers:%d:%d" % (swarm_id, self.level, self.number)
        return b"%b:units:%b:%d:%d" % (swarm_id, self.place.encode(), self.level, self.number)


SAMPLE = Shard(ALL, 0, 0)


@lru_cache(maxsize=4096)
def homes(swarm_id: bytes, peer: PeerId, places: tuple[Place, ...]) -> frozenset[bytes]:
    """The digests of all keys under which a peer of these places may lie, however large it takes the swarm for."""
    shards = [
        Shard(place, level, _number(peer, level)) for place in (ALL, WIDE, *places) for level in range(MAX_LEVEL + 1)
    ]
    return frozenset(key_digest(shard.key(swarm_id)) for shard in shards)


def level_for(peers: float) -> int:
    """The level of a place with so many peers."""
    level = 0
    while level < MAX_LEVEL and peers > PEERS_PER_SHARD << level:
        level += 1
    return level


def places(units: int) -> list[Place]:
    """All places of a large swarm whose model has so many units."""
    return [WIDE, *(str(number) for number in range(-(-units // RANGE_UNITS)))]


def places_of(span: tuple[int, int]) -> list[Place]:
    """Where a peer with this span stands in a large swarm."""
    if span[0] >= span[1]:
        return [WIDE]
    first, last = span[0] // RANGE_UNITS, (span[1] - 1) // RANGE_UNITS
    return [WIDE] if last - first >= MAX_RANGES else [str(number) for number in range(first, last + 1)]


def own_shard(place: Place, peer: PeerId, peers: float) -> Shard:
    """Where `peer` is at a place of about `peers` peers."""
    level = level_for(peers)
    return Shard(place, level, _number(peer, level))


def _number(peer: PeerId, level: int) -> int:
    return int.from_bytes(peer_digest(peer)[:2], "big") >> (16 - level)


def all_shards(place: Place, peers: float) -> list[Shard]:
    """Every shard at which a place of about `peers` peers may be found."""
    levels = range(level_for(peers / UNCERTAINTY), level_for(peers * UNCERTAINTY) + 1)
    return [Shard(place, level, number) for level in levels for number in range(1 << level)]


def is_in_sample(peer: PeerId, peers: float) -> bool:
    """Whether this is one of the some 64 of about `peers` peers whom newcomers meet first."""
    return digest_share(peer) * peers <= PEERS_PER_SHARD


def digest_share(peer: PeerId) -> float:
    """The share of all peers whose digests are smaller."""
    return int.from_bytes(peer_digest(peer), "big") / (1 << 64)


def peers_from_sample(found: Collection[PeerId]) -> float:
    """How many peers a swarm has whose sample shows these: twice as many digests reach twice as far.

    The median one counts. The largest ones stand there by other peers' estimates, not by ours.
    """
    if len(found) < PEERS_PER_SHARD // 2:
        return len(found)
    shares = sorted(map(digest_share, found))
    middle = len(shares) // 2
    return max(float(len(found)), middle / shares[middle - 1])


EnoughAt = Callable[[Shard, Mapping[bytes, Record]], bool]
"""(shard, what has been found there) -> whether no more of its keepers need be asked"""


class ShardSampling:
    """What is known of the swarm's size and places. `units` is how many the model has, as far as that was seen."""

    def __init__(self, peer: PeerId, units: int = 0) -> None:
        self.units = units
        self.peers = 0.0
        self.population = 0.0  # peers of the table, where somebody has looked
        self._sizes: dict[Place, float] = {}  # of places that were read
        self._visits: Counter[Place] = Counter()
        self._misses: Counter[Place] = Counter()  # reads in a row that found nobody
        self._spans: list[tuple[int, int]] = []  # of the peers in the sample, which is a fair one
        self._found: dict[Shard, frozenset[PeerId]] = {}  # who stood there when it was last read
        self._random = random.Random(peer)
        self._reads = 0

    def __repr__(self) -> str:
        return f"<ShardSampling of about {self.peers:.0f} peers in a {'large' if self.large else 'small'} swarm>"

    @property
    def large(self) -> bool:
        """Whether there are too many to read everything."""
        return self.peers >= LARGE

    def enough(self, living: Collection[PeerId], fresh_until: float, *, calm: bool) -> EnoughAt | None:
        """What ends the next read before all keepers were asked: in a large swarm the first answer, in a small one that is calm
        a fresh record, which is good until then at least, of each of the living who stood there the last time. None: nothing."""
        if self._reads % (THOROUGH_EVERY if self.large else CALM_THOROUGH_EVERY) == 0:
            return None
        if self.large:
            return lambda _shard, records: bool(records)
        if not calm:
            return None
        awaited = {
            shard: {peer.encode() for peer in peers.intersection(living)} for shard, peers in self._found.items()
        }

        def are_fresh(shard: Shard, records: Mapping[bytes, Record]) -> bool:
            fresh = {subkey for subkey, record in records.items() if record.expires_at >= fresh_until}
            return bool(awaited.get(shard)) and awaited[shard] <= fresh

        return are_fresh

    def is_in_doubt(self, found: Mapping[Shard, Sequence[Announcement]]) -> bool:
        """Whether a read makes the swarm look so large that the table is to be asked how large it is."""
        if SAMPLE not in found:
            return False
        claimed = peers_from_sample([peer.peer for peer in found[SAMPLE]])
        return claimed >= PEERS_PER_SHARD and claimed > UNCERTAINTY * self._count_all(found)

    @staticmethod
    def _count_all(found: Mapping[Shard, Sequence[Announcement]]) -> float:
        return float(len({peer.peer for shard, records in found.items() if shard.place == ALL for peer in records}))

    # -- reading

    def next_look(self, span: tuple[int, int]) -> list[Shard]:
        """What to read now. `span` is our own."""
        self._reads += 1
        if not self.large:
            return list(dict.fromkeys([SAMPLE, *all_shards(ALL, self.peers)]))
        if self._reads % SAMPLE_EVERY == 0:
            return [SAMPLE]
        own = places_of(span)
        others = [place for place in places(self.units) if place not in own]
        return self._some_of(self._next_of(others if others and self._reads % 2 else own))

    def whole(self, place: Place) -> list[Shard]:
        """Everything at a place, for whoever must know all holders of a unit; there may be many."""
        if not self.large:
            return self.next_look((0, 0))
        size = self.size(place)
        return _small(place) if size <= WHOLE else all_shards(place, size)

    def _next_of(self, places: Sequence[Place]) -> Place:
        """In turn, drawn among those whose turn it is; where nobody was found, another visit can wait."""
        turns = {place: self._visits[place] + 2 * self._misses[place] for place in places}
        least = min(turns.values())
        place = self._random.choice([place for place, visits in turns.items() if visits == least])
        self._visits[place] += 1
        return place

    def _some_of(self, place: Place) -> list[Shard]:
        """A small place whole; of another one shard, or where its level is only guessed, one of each level that it may have."""
        size, misses = self.size(place), self._misses[place]
        if size <= WHOLE and not misses:
            return _small(place)
        level, spread = level_for(size), 0 if place in self._sizes else 1 + misses
        levels = range(max(0, level - spread), min(MAX_LEVEL, level + spread) + 1)
        return [Shard(place, level, self._random.randrange(1 << level)) for level in levels]

    def size(self, place: Place) -> float:
        """Peers at a place: as it was read, else as the peers in the sample are spread."""
        if place in self._sizes:
            return self._sizes[place]
        here = sum(place in places_of(span) for span in self._spans)
        return self.peers * here / max(1, len(self._spans))

    def saw(self, found: Mapping[Shard, Sequence[Announcement]]) -> None:
        """Take in what a read brought."""
        everybody = {peer.peer: peer for records in found.values() for peer in records}
        self.units = max([self.units, *(peer.span[1] for peer in everybody.values())])
        self._found.update({shard: frozenset(peer.peer for peer in records) for shard, records in found.items()})
        if SAMPLE in found:
            self._look_at_sample(found)
        for place in {shard.place for shard in found} - {ALL}:
            self._count({shard: records for shard, records in found.items() if shard.place == place}, place)

    def _look_at_sample(self, found: Mapping[Shard, Sequence[Announcement]]) -> None:
        counted = self._count_all(found)
        claimed = peers_from_sample([peer.peer for peer in found[SAMPLE]])
        if self.is_in_doubt(found):  # identities can be tried out until they make the sample dense
            claimed = min(claimed, self.population * UNCERTAINTY)
        if self.peers >= PEERS_PER_SHARD:  # one look alone does not blow it up
            claimed = min(claimed, self.peers * GROWTH)
        self.peers = max(counted, claimed)
        self._spans = [peer.span for peer in found[SAMPLE]]
        if not self.large:
            self._sizes.clear()

    def _count(self, found: Mapping[Shard, Sequence[Announcement]], place: Place) -> None:
        """Peers that estimate differently stand at different levels: each level's count is of another part of the place."""
        by_level: dict[int, list[int]] = {}
        for shard, records in found.items():
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
        """Where our announcement belongs; near the threshold in the small and in the large swarm's places."""
        own = [SAMPLE] if is_in_sample(peer, self.peers) else []
        if self.peers < LARGE * UNCERTAINTY:
            own.append(own_shard(ALL, peer, self.peers))
        if self.peers > LARGE / UNCERTAINTY:
            own += [own_shard(place, peer, self.size(place)) for place in places_of(span)]
        return list(dict.fromkeys(own))


def _small(place: Place) -> list[Shard]:
    """All shards of the levels at which the peers of a small place may be."""
    return [Shard(place, level, number) for level in range(WHOLE_LEVELS) for number in range(1 << level)]
