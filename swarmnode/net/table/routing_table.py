"""Routing table: the peers of the table that this one knows, some at every distance, most among the nearest.

Keepers of records (the peers nearest to a key of the table), and an estimate of the number of peers in the table.

Keepers are remembered for a while, since finding them costs most.
"""

from __future__ import annotations

import hashlib
import random
import statistics
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from swarmnode.net.interfaces import PeerId, key_digest
from swarmnode.net.limits.address_group import is_wide
from swarmnode.net.limits.fair_share import Recent

BUCKET_PEERS = 8  # Kademlia's k, as in BitTorrent
GROUP_PEERS = 2  # peers of one address group of the open internet; further ones come after those of other groups
DOUBTFUL_S = (
    60.0  # a peer heard of since is not pinged: else each call of a newcomer to a full bucket would cause a ping
)
ID_BITS = 160


@lru_cache(maxsize=16_384)
def node_id(peer: PeerId) -> int:
    """Return the id of a peer in the DHT's id space; its distance to a key's id decides which peers keep the key."""
    return int.from_bytes(hashlib.sha1(b"swarmnode peer " + peer.encode(), usedforsecurity=False).digest(), "big")


def key_id(key: bytes) -> int:
    """Return the id of a key in the DHT's id space; the peers with the nearest ids keep the key."""
    return int.from_bytes(key_digest(key), "big")


def id_bytes(place: int) -> bytes:
    """Return a place in the table (a number) as the 20 bytes for messages and validators."""
    return place.to_bytes(ID_BITS // 8, "big")


class _Known(NamedTuple):
    group: str  # of its address
    heard_s: float


class RoutingTable:
    """Table of known peers: a bucket for each length of the prefix that a peer's place, a number made from its id, shares with
    the own one.

    Known peers that answer stay: newcomers, which cost nothing to make, do not push them out, except for peers of an address
    group with more than GROUP_PEERS peers in the bucket.
    """

    def __init__(self, own: PeerId, clock: Callable[[], float] = time.monotonic) -> None:
        self._own = node_id(own)
        self._clock = clock
        self._buckets: dict[int, dict[PeerId, _Known]] = {}  # least recently heard first

    def __len__(self) -> int:
        return sum(map(len, self._buckets.values()))

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._buckets.get(self._bucket_of(peer), {})

    def peers(self) -> set[PeerId]:
        """Return all peers in the routing table."""
        return {peer for bucket in self._buckets.values() for peer in bucket}

    def heard(self, peer: PeerId, group: str) -> PeerId | None:
        """Note a sign of life of a peer and enter it. Returns None, or, if its bucket is full, a peer to ping because it may be
        gone."""
        number = self._bucket_of(peer)
        if number == 0:
            return None  # this peer itself
        bucket, now_s = self._buckets.setdefault(number, {}), self._clock()
        if peer not in bucket and len(bucket) >= BUCKET_PEERS:
            crowding = self._crowding(bucket, group)
            if crowding is None:
                longest = next(iter(bucket))
                return longest if now_s - bucket[longest].heard_s >= DOUBTFUL_S else None
            del bucket[crowding]
        bucket.pop(peer, None)
        bucket[peer] = _Known(group, now_s)
        return None

    def lost(self, peer: PeerId) -> None:
        """Remove a peer that does not answer from the routing table."""
        self._buckets.get(self._bucket_of(peer), {}).pop(peer, None)

    def nearest(self, place: int, count: int = BUCKET_PEERS) -> list[PeerId]:
        """Return the `count` known peers nearest to a place, of different address groups if possible.

        Else a crowd of one group beside a place would be all that its neighbours ask, and all that they name.
        """
        groups = {peer: known.group for bucket in self._buckets.values() for peer, known in bucket.items()}
        return diverse(sorted(groups, key=lambda peer: node_id(peer) ^ place), groups, count)

    def _bucket_of(self, peer: PeerId) -> int:
        return (node_id(peer) ^ self._own).bit_length()

    @staticmethod
    def _crowding(bucket: dict[PeerId, _Known], newcomer: str) -> PeerId | None:
        """Return the latest peer of a group with more than its share if the newcomer's group has less; else None."""
        sizes = Counter(known.group for known in bucket.values() if is_wide(known.group))
        if is_wide(newcomer) and sizes[newcomer] >= GROUP_PEERS:
            return None
        return next((peer for peer in reversed(bucket) if sizes[bucket[peer].group] > GROUP_PEERS), None)


def diverse(peers: Iterable[PeerId], groups: Mapping[PeerId, str], count: int) -> list[PeerId]:
    """Return the first `count` peers, at most `GROUP_PEERS` of one address group of the open internet unless there are too few
    others."""
    chosen: list[PeerId] = []
    passed_by: list[PeerId] = []
    sizes: Counter[str] = Counter()
    for peer in peers:
        group = groups.get(peer, "")
        sizes[group] += is_wide(group)
        (passed_by if sizes[group] > GROUP_PEERS else chosen).append(peer)
        if len(chosen) == count:
            break
    return (chosen + passed_by)[:count]


REPLICAS = 5
REMEMBERED_S = 500.0  # meanwhile newcomers nearer to the key are overlooked; readers ask the next nearest, too
MAX_KEYS = 64
SAMPLES = 9  # of the population

Find = Callable[[int], Awaitable[Sequence[PeerId]]]
"""Function that returns the peers nearest to a place in the table."""


class Population:
    """Number of peers in the table: the median of the latest estimates, each from one random place."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.SystemRandom() if seed is None else random.Random(seed)
        self._estimates: deque[float] = deque(maxlen=SAMPLES)

    @property
    def peers(self) -> float:
        """Estimated number of peers; 0 before the first estimate."""
        return statistics.median(self._estimates) if self._estimates else 0.0

    def next_place(self) -> int:
        """Return a random id of the DHT's id space, around which the size of the swarm is estimated next."""
        return self._random.getrandbits(ID_BITS)

    def saw(self, place: int, nearest: Sequence[PeerId]) -> None:
        """Add an estimate of the swarm's size from the peers `nearest` to `place`: of N peers, the n-th nearest is about n/N of
        the way around. Adds none if no peer answered."""
        if nearest:
            farthest = max(node_id(peer) ^ place for peer in nearest)
            self._estimates.append(max(len(nearest), (len(nearest) - 1) * (1 << ID_BITS) / (farthest + 1)))


class Keepers:
    """Keepers of the keys that this peer writes to. Fewer than `REPLICAS` are not remembered, but looked for each time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: Recent[int, tuple[float, Sequence[PeerId]]] = Recent(MAX_KEYS)

    async def of(self, key: int, find: Find) -> Sequence[PeerId]:
        """Return the keepers of a key, nearest first, remembered or found by `find`."""
        now_s = self._clock()
        until_s, keepers = self._known.get(key, (0.0, ()))
        if now_s >= until_s:
            keepers = await find(key)
            self._known.pop(key, None)
            if len(keepers) == REPLICAS:
                self._known[key] = (now_s + REMEMBERED_S, keepers)
        return keepers

    def forget(self, key: int) -> None:
        """Forget the keepers of a key, since one of them is gone or refuses: they are looked for the next time."""
        self._known.pop(key, None)
