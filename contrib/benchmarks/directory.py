"""Cost of the directory for a peer of a large swarm, and the knowledge that it buys. Prints JSON.

    python contrib/benchmarks/directory.py [--peers 10000] [--units 40] [--watchers 40] [--minutes 10]

The peers' records lie at the places where the real rules put them, as large as those of home machines are, signed; some of
the peers, the watchers, are real directories on a virtual clock. Every operation on the table is charged with what
Kademlia takes for it. Look-ups are walked through routing tables of k peers a bucket over all peers' random ids. A call
costs what it was measured to take between two p2pd (bytes of TCP payload, both ways, `ss -ti`) plus TCP/IP headers.
`caused_bytes_per_s` is what a peer's own stores and reads move. Each byte is sent by one peer and received by another, so
on average a peer sends as much and receives as much, for itself and for others: `sent_and_received_bytes_per_s`.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import hashlib
import json
import random
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from swarmnode.net.identity import Identity, verify
from swarmnode.net.interfaces import Dht, Enough, PeerId, Record
from swarmnode.net.kademlia import BUCKET_PEERS, REMEMBERED_S, REPLICAS
from swarmnode.net.memory.virtual_time import run_virtual
from swarmnode.swarm.peers import shards
from swarmnode.swarm.peers.directory import Directory, DirectoryConfig
from swarmnode.swarm.peers.shards import SAMPLE
from swarmnode.swarm.records.announcement import (
    VERSION,
    Announcement,
    Hearsay,
    Introduction,
    Machine,
    PathNews,
    Place,
    Section,
    ServingLoad,
    State,
    WorkSpeeds,
    peer_digest,
    said,
    sign_announcement,
)

SWARM = bytes(32)
EPOCH_S = 1_790_000_000.0
ID_BITS = 160
CALL_BYTES = 440 + 160  # measured besides the messages themselves; TCP/IP headers of four packets
FIND_BYTES, FOUND_BYTES, NEIGHBOUR_BYTES = 46, 26, 64  # question, empty answer, each neighbour that it names
ENTRY_BYTES = 100  # of a record besides its value
WARM_UP_S = 900.0
WIDTHS = (4, 8, 8, 12)


class Kademlia:
    """Ids of all peers. A peer knows up to k others in every subtree that it is not in, drawn once."""

    def __init__(self, peers: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._ids = sorted(self._random.getrandbits(ID_BITS) for _ in range(peers))

    def look_up(self, key: int, stop_at: int) -> int:
        """Return the number of calls of a look-up from a random peer that stops once `stop_at` of the key's keepers are
        asked."""
        keepers = set(self._nearest(self._ids, key, REPLICAS))
        known = set(self._nearest(self._table(self._random.choice(self._ids)), key, BUCKET_PEERS))
        asked: set[int] = set()
        while True:
            ahead = [peer for peer in self._nearest(known, key, BUCKET_PEERS) if peer not in asked]
            if not ahead or len(asked & keepers) >= stop_at:
                return len(asked)
            asked.add(ahead[0])
            known.update(self._nearest(self._table(ahead[0]), key, BUCKET_PEERS))

    def _table(self, peer: int) -> list[int]:
        """Return the routing table of `peer`, drawn at random by its id."""
        dice, table = random.Random(peer), []
        for bit in range(ID_BITS - 1, -1, -1):
            low = ((peer >> bit) ^ 1) << bit
            first, last = bisect.bisect_left(self._ids, low), bisect.bisect_left(self._ids, low + (1 << bit))
            table += dice.sample(self._ids[first:last], min(BUCKET_PEERS, last - first))
            near = peer >> bit << bit
            if bisect.bisect_left(self._ids, near + (1 << bit)) - bisect.bisect_left(self._ids, near) <= 1:
                return table
        return table

    @staticmethod
    def _nearest(peers: Any, key: int, count: int) -> list[int]:
        return sorted(peers, key=lambda peer: peer ^ key)[:count]


class Population:
    """All peers' records, made when they are read: as old as they would be at that moment."""

    def __init__(self, peers: int, units: int, seed: int) -> None:
        dice = random.Random(seed)
        self.identities: dict[PeerId, Identity] = {}
        self.spans: dict[PeerId, tuple[int, int]] = {}
        for number in range(peers):
            identity = Identity(hashlib.sha256(b"%d %d" % (seed, number)).digest())
            width = min(dice.choice(WIDTHS), units)
            start = dice.randrange(units - width + 1)
            self.identities[identity.peer_id], self.spans[identity.peer_id] = identity, (start, start + width)
        sizes = Counter(place for span in self.spans.values() for place in shards.places_of(span))
        self.at: dict[bytes, list[PeerId]] = defaultdict(list)
        for peer, span in self.spans.items():
            stands = [shards.own_shard(place, peer, sizes[place]) for place in shards.places_of(span)]
            stands += [SAMPLE] if shards.is_in_sample(peer, peers) else []
            for shard in stands:
                self.at[shard.key(SWARM)].append(peer)
        self._period_s = DirectoryConfig().publish_period_s(peers)
        self._life_s = self._period_s * DirectoryConfig().life_factor

    def record(self, peer: PeerId, now: float) -> Record:
        """Return the peer's latest record at `now`."""
        offset_s = peer_digest(peer)[0] / 256 * self._period_s
        issued_at = now - (now + offset_s) % self._period_s
        announcement = announce(peer, self.spans[peer], issued_at, self._life_s)
        return Record(sign_announcement(announcement, self.identities[peer].sign), issued_at + self._life_s)


def announce(peer: PeerId, span: tuple[int, int], issued_at: float, life_s: float) -> Announcement:
    """Return an announcement as full as a busy home machine's; without round trips, which peers of a large swarm do not
    announce."""
    return Announcement(
        *(VERSION, SWARM, peer, int(issued_at * 1000), issued_at, issued_at + life_s, EPOCH_S),
        **said(sections(span)),
    )


def sections(span: tuple[int, int]) -> tuple[Section, ...]:
    """Return the sections of such an announcement."""
    others = [peer_digest(str(number)) for number in range(8)]
    return (
        Introduction(
            name="the box under the desk",
            addresses=("/ip4/203.0.113.77/tcp/40123", "/ip4/192.168.178.21/tcp/40123"),
        ),
        Place(state=State.READY, span=span, seeds=span),
        Machine(device="NVIDIA GeForce RTX 4090", memory_bytes=24 << 30),
        WorkSpeeds(decode_units_per_s=812.5, prefill_units_per_s=31234.5),
        ServingLoad(sessions=3, cache_tokens_free=65536),
        PathNews(up_bps=4.1e7, down_bps=2.2e8, coordinate=(-1200, 800, 341, 55, 12), reachability=2),
        Hearsay(unit_us=dict.fromkeys(others, 1230)),
    )


class Bill:
    """Cost of operations on the table, in bytes moved."""

    def __init__(self, kademlia: Kademlia, samples: int = 200) -> None:
        dice = random.Random(7)
        keys = [dice.getrandbits(ID_BITS) for _ in range(samples)]
        self.full_calls = statistics.fmean(kademlia.look_up(key, REPLICAS + 1) for key in keys)
        self.first_calls = statistics.fmean(kademlia.look_up(key, 1) for key in keys)
        self.step_bytes = CALL_BYTES + FIND_BYTES + FOUND_BYTES + BUCKET_PEERS * NEIGHBOUR_BYTES
        self.stored_bytes = 0.0
        self.read_bytes = 0.0

    def store(self, value: bytes, *, keepers_known: bool) -> None:
        """Charge storing `value` at all keepers, with a look-up first unless `keepers_known`."""
        self.stored_bytes += 0 if keepers_known else self.full_calls * self.step_bytes
        self.stored_bytes += REPLICAS * (CALL_BYTES + ENTRY_BYTES + len(value))

    def read(self, values: Sequence[bytes], *, thrifty: bool) -> None:
        """Charge reading one key: from the first keeper if `thrifty`, else from all. A key without values costs the whole
        look-up."""
        copies = 1 if thrifty else REPLICAS
        calls = self.first_calls if thrifty and values else self.full_calls
        self.read_bytes += calls * self.step_bytes + copies * sum(ENTRY_BYTES + len(value) for value in values)


class ChargedDht(Dht):
    """Table of one watcher; its operations are charged to the bill."""

    def __init__(self, population: Population, bill: Bill, own: dict[bytes, dict[bytes, Record]]) -> None:
        self._population = population
        self._bill = bill
        self._own = own  # what watchers stored, by key and peer
        self._known: dict[bytes, float] = {}

    async def store(self, key: bytes, subkey: bytes, value: bytes, *, expires_at: float) -> bool:
        now = unix_time()
        self._bill.store(value, keepers_known=self._known.get(key, 0.0) > now)
        if self._known.get(key, 0.0) <= now:
            self._known[key] = now + REMEMBERED_S
        self._own.setdefault(key, {})[subkey] = Record(value, expires_at)
        return True

    async def get(
        self, keys: Sequence[bytes], *, enough: Enough | None = None
    ) -> Mapping[bytes, Mapping[bytes, Record]]:
        now = unix_time()
        found: dict[bytes, dict[bytes, Record]] = {}
        for key in dict.fromkeys(keys):
            there = {peer.encode(): self._population.record(peer, now) for peer in self._population.at.get(key, [])}
            there.update(self._own.get(key, {}))
            found[key] = {subkey: record for subkey, record in there.items() if record.expires_at > now}
            ends = enough is not None and enough(key, found[key])
            self._bill.read([record.value for record in found[key].values()], thrifty=ends)
        return found

    async def population(self) -> float:
        self._bill.read([], thrifty=False)
        return float(len(self._population.spans))


class Watcher:
    """A peer of the population with a real directory."""

    def __init__(self, peer: PeerId, population: Population, kademlia: Kademlia, own: Any, bill: Bill) -> None:
        self.peer_id = peer
        self.dht = ChargedDht(population, bill, own)
        self.bill = bill
        self.span = population.spans[peer]
        identity = population.identities[peer]
        self.directory = Directory(self, SWARM, verify=verify, sign=identity.sign, now=unix_time)  # type: ignore[arg-type]


def unix_time() -> float:
    """Return the time of the virtual clock."""
    return EPOCH_S + asyncio.get_running_loop().time()


async def watch(watchers: Sequence[Watcher], seconds: float) -> dict[str, Any]:
    """Let them live, and see what it cost after they have settled."""
    for watcher in watchers:
        watcher.directory.announce(*sections(watcher.span))
        await watcher.directory.start()
    joining_bytes = watchers[0].bill.read_bytes + watchers[0].bill.stored_bytes
    await asyncio.sleep(WARM_UP_S)
    bill = watchers[0].bill
    before = bill.stored_bytes, bill.read_bytes
    await asyncio.sleep(seconds)
    peer_seconds = seconds * len(watchers)
    stored = (bill.stored_bytes - before[0]) / peer_seconds
    read = (bill.read_bytes - before[1]) / peer_seconds
    result = {
        "joining_bytes": round(joining_bytes / len(watchers)),
        "stores_bytes_per_s": round(stored, 1),
        "reads_bytes_per_s": round(read, 1),
        "caused_bytes_per_s": round(stored + read, 1),
        "sent_and_received_bytes_per_s": round(2 * (stored + read), 1),
        **knowledge(watchers),
    }
    for watcher in watchers:
        await watcher.directory.close()
    return result


def knowledge(watchers: Sequence[Watcher]) -> dict[str, Any]:
    """Return statistics of the peers and holders that the watchers know at this moment."""
    views = [watcher.directory.peers().values() for watcher in watchers]
    ages_s = [unix_time() - peer.issued_at for view in views for peer in view]
    at_home: list[int] = []
    elsewhere: list[int] = []
    for watcher, view in zip(watchers, views, strict=True):
        for unit in range(max(peer.span[1] for peer in view)):
            home = watcher.span[0] <= unit < watcher.span[1]
            (at_home if home else elsewhere).append(sum(peer.holds(unit) for peer in view))
    return {
        "known_peers": round(statistics.fmean(map(len, views))),
        "median_age_s": round(statistics.median(ages_s), 1),
        "estimated_peers": round(statistics.median(watcher.directory.crowd for watcher in watchers)),
        "holders_known_of_own_units": {"least": min(at_home), "median": statistics.median(at_home)},
        "holders_known_of_other_units": {"least": min(elsewhere), "median": statistics.median(elsewhere)},
    }


def main() -> None:
    """Parse the options, run the simulation and print its result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=10_000)
    parser.add_argument("--units", type=int, default=40)
    parser.add_argument("--watchers", type=int, default=40)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    began_s = time.monotonic()
    population = Population(options.peers, options.units, options.seed)
    kademlia = Kademlia(options.peers, options.seed)
    bill, own = Bill(kademlia), {}  # type: ignore[var-annotated]
    chosen = random.Random(options.seed).sample(list(population.spans), options.watchers)
    record_bytes = len(population.record(chosen[0], EPOCH_S).value)

    async def live() -> dict[str, Any]:
        return await watch([Watcher(peer, population, kademlia, own, bill) for peer in chosen], options.minutes * 60)

    result = run_virtual(live())
    calls = {"lookup_calls": round(bill.full_calls, 1), "calls_to_the_first_keeper": round(bill.first_calls, 1)}
    shape = {"peers": options.peers, "units": options.units, "record_bytes": record_bytes, **calls}
    print(json.dumps({**shape, **result, "seconds": round(time.monotonic() - began_s, 1)}, indent=2))


if __name__ == "__main__":
    main()
