"""Records that this peer keeps for the table, bounded, and shared fairly among the peers that stored them.

Routing table: the peers of the table that this one knows, some at every distance, most among the nearest.

Keepers of records (the peers nearest to a key of the table), and an estimate of the number of peers in the table.

Keepers are remembered for a while, since finding them costs most.

Look-up in the table: finds the peers nearest to some keys step by step, and merges the records of all of them.

No answer is trusted alone: a peer that names only its friends, or withholds records, is one of several. The peers near a key may
all belong to one stranger, since identities can be tried until they lie there. Therefore only GROUP_PEERS peers of one address
group of the open internet are asked while there are others. A peer named by such a group alone counts as one of it until it has
answered.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
import statistics
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from swarmnode.net.addressing.addresses import Claimant, is_wide
from swarmnode.net.fair_share import FairShare, Recent
from swarmnode.net.interfaces import MAX_RECORD_BYTES, PeerId, Record, key_digest

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


class _Contact(NamedTuple):
    group: str  # of its address
    seen_s: float


class RoutingTable:
    """Table of known peers: a bucket for each length of the prefix that a peer's place, a number made from its id, shares with
    the own one.

    Known peers that answer stay: newcomers, which cost nothing to make, do not push them out, except for peers of an address
    group with more than GROUP_PEERS peers in the bucket.
    """

    def __init__(self, own: PeerId, clock: Callable[[], float] = time.monotonic) -> None:
        self._own = node_id(own)
        self._clock = clock
        self._buckets: dict[int, dict[PeerId, _Contact]] = {}  # least recently heard first

    def __len__(self) -> int:
        return sum(map(len, self._buckets.values()))

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._buckets.get(self._bucket_of(peer), {})

    def peers(self) -> set[PeerId]:
        """Return all peers in the routing table."""
        return {peer for bucket in self._buckets.values() for peer in bucket}

    def record_contact(self, peer: PeerId, group: str) -> PeerId | None:
        """Note a sign of life of a peer and enter it. Returns None, or, if its bucket is full, a peer to ping because it may be
        gone."""
        number = self._bucket_of(peer)
        if number == 0:
            return None  # this peer itself
        bucket, now_s = self._buckets.setdefault(number, {}), self._clock()
        if peer not in bucket and len(bucket) >= BUCKET_PEERS:
            # of a group with more than its share the latest peer gives way to one of a group with less, or of none
            sizes = Counter(known.group for known in bucket.values() if is_wide(known.group))
            has_less = not is_wide(group) or sizes[group] < GROUP_PEERS
            over = (one for one in reversed(bucket) if has_less and sizes[bucket[one].group] > GROUP_PEERS)
            crowding = next(over, None)
            if crowding is None:
                longest = next(iter(bucket))
                return longest if now_s - bucket[longest].seen_s >= DOUBTFUL_S else None
            del bucket[crowding]
        bucket.pop(peer, None)
        bucket[peer] = _Contact(group, now_s)
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
        self._by_key: Recent[int, tuple[float, Sequence[PeerId]]] = Recent(MAX_KEYS)

    async def of(self, key: int, find: Find) -> Sequence[PeerId]:
        """Return the keepers of a key, nearest first, remembered or found by `find`."""
        now_s = self._clock()
        until_s, keepers = self._by_key.get(key, (0.0, ()))
        if now_s >= until_s:
            keepers = await find(key)
            self._by_key.pop(key, None)
            if len(keepers) == REPLICAS:
                self._by_key[key] = (now_s + REMEMBERED_S, keepers)
        return keepers

    def forget(self, key: int) -> None:
        """Forget the keepers of a key, since one of them is gone or refuses: they are looked for the next time."""
        self._by_key.pop(key, None)


AT_ONCE = 4  # calls
MAX_ASKED = 48  # peers for one key, however many are named
MAX_KNOWN = 512
MAX_FIND_KEYS = 8  # in one call, since its answer has a bound


Records = Mapping[bytes, Record]


@dataclass(frozen=True)
class KeyAnswer:
    """Answer of one peer for a key: its records, and the peers that it knows nearer to the key."""

    records: Records
    nearer: Sequence[PeerId]


Ask = Callable[[PeerId, Sequence[int]], Awaitable[Sequence[KeyAnswer] | None]]
"""Function of (peer, places of keys) that returns the peer's answer for each key; None if it does not answer."""

GroupOf = Callable[[PeerId], str]

EnoughThere = Callable[[int, Records], bool]
"""Function of (place of a key, records found under it) that returns whether no more peers need be asked."""


@dataclass
class _Search:
    """State of a search for one key in the hash table: known, asked and answering peers, and the records found."""

    candidates: dict[PeerId, set[str]]  # with the address groups of the peers that named them
    records: dict[bytes, Record]
    asked: set[PeerId] = field(default_factory=set)
    silent: set[PeerId] = field(default_factory=set)
    answered: set[PeerId] = field(default_factory=set)
    done: bool = False

    @property
    def waits(self) -> bool:
        """Whether a peer that was asked may still answer."""
        return len(self.asked) > len(self.answered) + len(self.silent)


class Lookup:
    """Look-up of some keys by the peer `own`. `own_records` has the records that `own` keeps under each key; the
    look-up starts with them.

    With `enough` the peers near a key are asked one after another until it returns true. After one of them was silent they are
    asked in parallel, as without `enough`, since waiting for each missing peer in turn would take too long.
    """

    def __init__(
        self,
        own: PeerId,
        own_records: Mapping[int, Records],
        start: Callable[[int], Iterable[PeerId]],
        ask: Ask,
        group_of: GroupOf,
        *,
        enough: EnoughThere | None = None,
    ) -> None:
        self._searches = {
            key: _Search({peer: set() for peer in start(key)}, dict(records)) for key, records in own_records.items()
        }
        self._own = own
        self._ask = ask
        self._group_of = group_of
        self._enough = enough
        for key, search in self._searches.items():
            search.done = self._has_enough(key, search)

    def records(self, key: int) -> dict[bytes, Record]:
        """Return the records found under a key, by subkey, from all peers that answered."""
        return self._searches[key].records

    def nearest(self, key: int, count: int) -> list[PeerId]:
        """Return the nearest `count` peers that answered, of different address groups if possible."""
        search = self._searches[key]
        answered = sorted(search.answered, key=lambda peer: node_id(peer) ^ key)
        return diverse(answered, {peer: self._group_of(peer) for peer in answered}, count)

    async def run(self) -> Lookup:
        """Ask peers until no nearer ones are known, or until there is enough; return self."""
        calls: dict[asyncio.Future[Sequence[KeyAnswer] | None], tuple[PeerId, list[int]]] = {}
        try:
            while True:
                while len(calls) < AT_ONCE and (question := self._next()) is not None:
                    calls[asyncio.ensure_future(self._ask(*question))] = question
                if not calls:
                    return self
                done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
                for call in done:
                    self._accept(*calls.pop(call), call.result())
        finally:
            for call in calls:
                call.cancel()

    def _next(self) -> tuple[PeerId, list[int]] | None:
        """Return the peer to ask next and the keys to ask for, and note that it is asked: the nearest peer to one key, that key,
        and others that it is near to, at most MAX_FIND_KEYS in all. None if there is no peer to ask now."""
        fronts = {key: self._front(key) for key, search in self._searches.items() if not search.done}
        for key, front in fronts.items():
            if front:
                peer = front[0]
                others = [other for other, nearest in fronts.items() if other != key and peer in nearest]
                keys = [key, *others][:MAX_FIND_KEYS]
                for each in keys:
                    self._searches[each].asked.add(peer)
                return peer, keys
        return None

    def _has_enough(self, key: int, search: _Search) -> bool:
        return self._enough is not None and self._enough(key, search.records)

    def _front(self, key: int) -> list[PeerId]:
        """Return the peers nearest to a key that are to be asked now, nearest first."""
        search = self._searches[key]
        one_by_one = self._enough is not None and not search.silent
        if len(search.asked) >= MAX_ASKED or (one_by_one and search.waits):
            return []
        living = sorted(search.candidates.keys() - search.silent, key=lambda peer: node_id(peer) ^ key)
        groups = {peer: self._supposed_group(search, peer) for peer in living}
        return [peer for peer in diverse(living, groups, BUCKET_PEERS) if peer not in search.asked]

    def _supposed_group(self, search: _Search, peer: PeerId) -> str:
        """Return the address group of a peer. Before its answer: the group of the peers that named it, if that is one group with
        many answers."""
        if peer not in search.answered and len(search.candidates[peer]) == 1:
            (group,) = search.candidates[peer]
            if sum(self._group_of(other) == group for other in search.answered) >= GROUP_PEERS:
                return group
        return self._group_of(peer)

    def _accept(self, peer: PeerId, keys: Sequence[int], answers: Sequence[KeyAnswer] | None) -> None:
        group = self._group_of(peer)
        for number, key in enumerate(keys):
            search = self._searches[key]
            if answers is None:
                search.silent.add(peer)
                continue
            search.answered.add(peer)
            for subkey, record in answers[number].records.items():
                known = search.records.get(subkey)
                if known is None or known.expires_at < record.expires_at:
                    search.records[subkey] = record
            for named in answers[number].nearer[:BUCKET_PEERS]:
                if named != self._own and (named in search.candidates or len(search.candidates) < MAX_KNOWN):
                    search.candidates.setdefault(named, set()).add(group)
            search.done = self._has_enough(key, search)


MAX_RECORDS = 4096
MAX_SUBKEYS = 256  # of a key
MAX_SUBKEY_BYTES = 256
PACKING_BYTES = 32  # overhead of a record in an answer: expiry, lengths

Slot = tuple[int, bytes]
"""Place of a key, and a subkey."""


class RecordStore:
    """Store with the record of each subkey that expires last.

    If it is full, writers with most records give way to writers with few. So a flood from invented peers pushes out only its own
    records, and records from before it stay.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._keys: dict[int, dict[bytes, Record]] = {}
        self._soonest_end = math.inf  # unix time; no record expires before it
        self._all: FairShare[Slot] = FairShare(MAX_RECORDS)
        self._of_key: dict[int, FairShare[Slot]] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def get(self, key: int) -> Mapping[bytes, Record]:
        """Return the unexpired records under a key, by subkey."""
        self._expire(key)
        return dict(self._keys.get(key, {}))

    def some(self, key: int, room_bytes: int) -> dict[bytes, Record]:
        """Return as many records under a key as fit into `room_bytes`, the shortest first, so that long records cannot hide others.

        Of MAX_SUBKEYS records, a record that is no longer than its share of the room is always included.
        """
        found: dict[bytes, Record] = {}
        for subkey, record in sorted(self.get(key).items(), key=lambda item: len(item[1].value)):
            room_bytes -= len(subkey) + len(record.value) + PACKING_BYTES
            if room_bytes < 0:
                break
            found[subkey] = record
        return found

    def items(self) -> Iterator[tuple[int, bytes, Record]]:
        """Yield all unexpired records, with key and subkey."""
        for key in list(self._keys):
            for subkey, record in self.get(key).items():
                yield key, subkey, record

    def store(self, key: int, subkey: bytes, value: bytes, expires_at: float, claimant: Claimant) -> bool:
        """Keep a valid record for `claimant`. Returns False if it is too large or expired, one that expires no earlier is known, or
        there is no room."""
        if len(value) > MAX_RECORD_BYTES or len(subkey) > MAX_SUBKEY_BYTES or expires_at <= self._clock():
            return False
        slot, known = (key, subkey), self._keys.get(key, {}).get(subkey)
        if known is not None and known.expires_at >= expires_at:
            return False
        if known is None:
            # Expired records are removed first; else each record of a flood would cost a look at all records.
            if len(self._all) >= MAX_RECORDS and self._clock() >= self._soonest_end:
                for other in list(self._keys):
                    self._expire(other)
                ends = (record.expires_at for records in self._keys.values() for record in records.values())
                self._soonest_end = min(ends, default=math.inf)
            self._expire(key)
            for shares in (self._of_key.setdefault(key, FairShare(MAX_SUBKEYS)), self._all):
                yielding = shares.admit(slot, claimant)
                if yielding is not None:
                    self._remove(yielding)
                if yielding == slot:
                    return False
        elif subkey == claimant.peer.encode():  # counts for its author, whichever peer brought it
            self._all.move(slot, claimant)
            self._of_key[key].move(slot, claimant)
        self._keys.setdefault(key, {})[subkey] = Record(value, expires_at)
        self._soonest_end = min(self._soonest_end, expires_at)
        return True

    def _expire(self, key: int) -> None:
        now = self._clock()
        for subkey, record in list(self._keys.get(key, {}).items()):
            if record.expires_at <= now:
                self._remove((key, subkey))

    def _remove(self, slot: Slot) -> None:
        key, subkey = slot
        self._all.leave(slot)
        if key in self._of_key:
            self._of_key[key].leave(slot)
        if key in self._keys:
            self._keys[key].pop(subkey, None)
        if not self._keys.get(key):
            self._keys.pop(key, None)
            if not len(self._of_key.get(key, ())):
                self._of_key.pop(key, None)
