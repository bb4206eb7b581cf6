"""Under which DHT keys a swarm's announcements lie.

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

from collections.abc import Collection
from functools import lru_cache
from typing import NamedTuple

from swarmnode.net.interfaces import PeerId, key_digest
from swarmnode.swarm.records.announcement import peer_digest

PEERS_PER_SHARD = 64
MAX_LEVEL = 10  # 1,024 shards: 65,536 peers at one place
RANGE_UNITS = 8
MAX_RANGES = 4  # of one peer: more stores than this cost too much
LARGE = 256  # peers from which on a swarm is large
UNCERTAINTY = 1.5  # two peers' estimates of the same number may differ by this factor

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
