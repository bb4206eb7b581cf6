"""Directory: a peer's live picture of its swarm. It publishes the peer's own announcement and reads all others.

This is the only async file of this room; `PeerTable` and `ShardSampling` make its decisions.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from swarmnode.errors import ProtocolError, SwarmnodeError
from swarmnode.metrics import table
from swarmnode.metrics.metric import Histogram, Reading, Readings
from swarmnode.net.interfaces import Enough, Network, PeerId
from swarmnode.net.tasks import OnCrash, Tasks, until_first
from swarmnode.swarm.peers import shards
from swarmnode.swarm.peers.peer_table import PeerTable
from swarmnode.swarm.peers.shards import LARGE, Shard, ShardSampling
from swarmnode.swarm.records.announcement import (
    MAX_LIFE_S,
    VERSION,
    Announcement,
    Section,
    State,
    Vouch,
    announcement_reader,
    fit,
    said,
    sign_announcement,
)
from swarmnode.swarm.records.signed import Sign, Verify
from swarmnode.swarm.storage.remembered import KnownPeers

logger = logging.getLogger(__name__)
T = TypeVar("T")

URGENT_FIELDS = ("state", "span", "seeds", "addresses")
GET, STORE = "get", "store"
KEY_BYTES = 6000  # of a read, per key: it asks some five peers, from neighbour to neighbour
RECORD_BYTES = 100  # of a record besides its value: subkey, expiry, framing


@dataclass(frozen=True)
class DirectoryConfig:
    """Periods, limits and factors of reading and publishing. Both slow down as the swarm grows, to bound a peer's
    traffic."""

    read_s: float = 1.0
    max_read_s: float = 5.0
    calm_growth: float = 1.3  # factor on the period after each read that finds the same peers, states, spans and runs
    read_bytes_per_s: float = 12_000.0  # budget; a large read delays the next one
    least_read_bytes_per_s: float = 600.0  # budget in the largest swarms
    publish_s: float = 5.0
    max_publish_s: float = 150.0
    life_factor: float = 3.2  # an announcement survives three lost refreshes: 16 s, in the largest swarms 8 min
    fresh_factor: float = 1.5  # publishing periods; one and a store pass between two refreshes
    crowd: int = 40  # peers beyond which reading slows down (publishing: from twice as many)
    retry_s: float = 1.0  # after a failed store
    dht_timeout_s: float = 10.0
    save_s: float = 30.0

    def read_period_s(self, peers: float) -> float:
        """Return the seconds between two reads in a swarm of `peers` peers, while its peers change."""
        return min(self.max_read_s, self.read_s * max(1.0, peers / self.crowd))

    def publish_period_s(self, peers: float) -> float:
        """Return the seconds between two refreshes of the own announcement in a swarm of `peers` peers."""
        return min(self.max_publish_s, self.publish_s * max(1.0, peers / (2 * self.crowd)))

    def fresh_s(self, peers: float) -> float:
        """Return the least remaining validity, in seconds, of an announcement that its peer refreshes on time."""
        return (self.life_factor - self.fresh_factor) * self.publish_period_s(peers)

    def rest_s(self, keys: int, values_bytes: Sequence[int], peers: float) -> float:
        """Return the seconds to wait after a read of `keys` keys that brought values of these sizes, to stay within the
        budget."""
        read_bytes = KEY_BYTES * keys + sum(values_bytes) + RECORD_BYTES * len(values_bytes)
        share_bytes_per_s = self.read_bytes_per_s * min(1.0, LARGE / max(1.0, peers))
        return read_bytes / max(share_bytes_per_s, self.least_read_bytes_per_s)


class DhtMeter:
    """Durations and failures of DHT operations, measured at the caller, so that time spent waiting for p2pd counts."""

    def __init__(self) -> None:
        self._seconds = {operation: Histogram() for operation in (GET, STORE)}
        self._failures = Counter(dict.fromkeys((GET, STORE), 0))

    @contextmanager
    def timing(self, operation: str) -> Iterator[None]:
        """Measure one operation as a context. A cancelled operation does not count as failed."""
        try:
            with self._seconds[operation].timing():
                yield
        except Exception:
            self._failures[operation] += 1
            raise

    def readings(self) -> Readings:
        """Yield, for DHT reads and for DHT writes, the durations and the number of failures."""
        for operation, seconds in self._seconds.items():
            yield Reading(table.DHT_SECONDS, seconds, (operation,))
            yield Reading(table.DHT_FAILURES, self._failures[operation], (operation,))


class Directory:
    """The live peers of a swarm. Call `start` before use and `close` at the end, which publishes a goodbye if this peer has
    announced itself.

    `check` raises ProtocolError for an announcement of another peer that breaks a rule of the swarm; it is left out like an invalid
    one. A client never calls `announce` and needs no `sign`. In a swarm that has an owner `vouch` decides whose announcements
    count. `now` returns unix time in seconds. `on_suspected` gets each suspected peer and the reason.
    """

    def __init__(
        self,
        network: Network,
        swarm_id: bytes,
        *,
        verify: Verify,
        sign: Sign | None = None,
        config: DirectoryConfig = DirectoryConfig(),
        known_peers: KnownPeers | None = None,
        vouch: Vouch | None = None,
        certificate: bytes = b"",
        check: Callable[[Announcement], None] = lambda _announcement: None,
        now: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        on_suspected: Callable[[PeerId, str], object] = lambda _peer, _reason: None,
        on_crash: OnCrash | None = None,
    ) -> None:
        self.network = network
        self._on_suspected = on_suspected
        self.swarm_id = swarm_id
        self.config = config
        self.known_peers = known_peers
        self.revision = 0
        self.dht_meter = DhtMeter()
        self._read = announcement_reader(swarm_id, verify, vouch)
        self._check = check
        self._certificate = certificate  # sent with the own announcements
        self._sign = sign
        self._now = now
        self._sleep = sleep
        self._peer_table = PeerTable()
        self._own: Announcement | None = None
        self._started_at = now()
        # by peer: lead of its new announcements over `now`, in seconds; the largest
        self.clock_offsets: dict[PeerId, float] = {}
        self._sequence = 0
        self._expires_at = 0.0
        self._sampling = ShardSampling(network.peer_id)
        self._stored: frozenset[Shard] = frozenset()  # where the own announcement was stored last
        self._stood = (0, 0)
        self._rest_s = 0.0  # pause required by the last read
        self._next_save_at = 0.0
        self._speak = asyncio.Event()
        self._wake = asyncio.Event()
        self._calm = 1.0  # factor on the time between reads
        self._seen: frozenset[tuple[PeerId, int, tuple[int, int], tuple[int, int, int]]] = frozenset()
        self._moved = asyncio.Event()  # set and replaced at every change
        self._closed = False
        self._tasks = Tasks("directory", on_crash=on_crash)

    async def start(self) -> None:
        """Read the swarm once, then keep reading and publishing until `close`."""
        await self.refresh()
        if self.crowd > shards.PEERS_PER_SHARD:  # only the sample was read
            await self.refresh()
        self._tasks.spawn(self._read_forever(), "reads")
        self._tasks.spawn(self._publish_forever(), "publishes")

    async def close(self) -> None:
        """Stop, and publish a goodbye if this peer has announced itself, so that no peer counts on it. Safe to call
        twice."""
        self._closed = True  # ends a loop whose wait_for lost the cancellation, as it may before Python 3.12
        await self._tasks.close()
        if self._own is not None and self._own.life is not State.OFFLINE:
            self._own = msgspec.structs.replace(self._own, state=State.OFFLINE, sessions=0)
            await self._publish()
        await self._save()

    def peers(self) -> Mapping[PeerId, Announcement]:
        """Return a snapshot of the live peers by id, including this peer once it has announced itself."""
        return self._peer_table.live

    def ready_after(self) -> Mapping[PeerId, int]:
        """Return a step for each peer that is ready with layers: the training step that earlier holders of these layers had
        reached when the peer came.

        The step is -1 if the layers had no holder, or if the peer came before this machine watched the swarm.
        """
        return self._peer_table.ready_after()

    def suspects(self) -> Mapping[PeerId, Announcement]:
        """Return the latest announcements of suspected peers that have not come back, by id. These peers may be alive
        or not."""
        return self._peer_table.suspects(self._now())

    def addresses_of(self, peer: PeerId) -> Sequence[str]:
        """Return the addresses in a peer's newest announcement, live or not; empty if there is none."""
        newest = self._peer_table.newest(peer)
        return () if newest is None else newest.addresses

    def why_suspected(self, peer: PeerId) -> str:
        """Return the reason given to `suspect` for a peer; empty if it is not suspected."""
        return self._peer_table.why_suspected(peer)

    def hurry(self) -> None:
        """Read the announcements at once, instead of after the usual interval, because a caller waits for a change."""
        self._calm = 1.0
        self._wake.set()

    @property
    def crowd(self) -> float:
        """Approximate number of peers in the swarm. In a large swarm `peers` is a sample of them."""
        return max(self._sampling.peers, float(len(self._peer_table.live)))

    @property
    def own(self) -> Announcement | None:
        """Announcement of this peer, published or not; None before the first `announce`."""
        return self._own

    def announce(self, *sections: Section) -> None:
        """Change these sections of the own announcement. Other fields stay as they are.

        Entries that do not fit into a record are left out. A new state, span, seeds or addresses are published at once,
        other fields with the next refresh. Raises ValueError if a field is out of its bounds or the directory has no
        key.
        """
        if self._sign is None:
            raise ValueError("a directory without a key cannot announce")
        before = self._own or Announcement(VERSION, self.swarm_id, self.network.peer_id, 0, 0.0, 0.0, self._started_at)
        after = fit(msgspec.structs.replace(before, **said(sections)))
        if after == self._own:
            return
        sign_announcement(self._stamp(after), self._sign)  # a field out of bounds is the caller's bug: raise it here
        self._own = after
        urgent = any(getattr(after, field) != getattr(before, field) for field in URGENT_FIELDS)
        if urgent or before.sequence == 0:
            self._speak.set()

    def suspect(self, peer: PeerId, reason: str) -> None:
        """Drop a failed peer from the view at once. It comes back after a restart, or with an announcement that it issues
        later, after a probation. Nothing happens if it is this peer itself, unknown or paused."""
        if peer == self.network.peer_id:
            return
        logger.info("peer %s suspected: %s", peer, reason)
        self._on_suspected(peer, reason)
        self._peer_table.suspect(peer, reason, self._now())
        self._update()
        self._wake.set()

    def expel(self, peers: Iterable[PeerId]) -> None:
        """Drop peers that no longer belong to the swarm, until a valid announcement of theirs arrives."""
        for peer in peers:
            self._peer_table.forget(peer)
        self._update()

    async def changed(self, since: int) -> int:
        """Wait until the directory's `revision` differs from `since`, and return the new revision."""
        while self.revision == since:
            await self._moved.wait()
        return self.revision

    async def refresh(self) -> None:
        """Read the announcements now. If the DHT does not answer, the view stays as it is until its records expire."""
        await self._read_shards(self._sampling.next_shards((0, 0) if self._own is None else self._own.span))

    async def read_holders(self, unit: int) -> None:
        """Read the announcements of all holders of a layer, even in a large swarm with many of them."""
        for place in (shards.WIDE, *shards.places_of((unit, unit + 1))):
            await self._read_shards(self._sampling.whole(place))

    async def _read_shards(self, wanted: Sequence[Shard]) -> None:
        keys = {shard: shard.key(self.swarm_id) for shard in wanted}
        try:
            found = await self._on_dht(GET, self.network.dht.get(list(keys.values()), enough=self._enough(keys)))
        except (SwarmnodeError, asyncio.TimeoutError) as error:
            logger.warning("cannot read the swarm's announcements: %s", error or "no answer")
        else:
            values = {shard: [record.value for record in found.get(key, {}).values()] for shard, key in keys.items()}
            there = {shard: self._observe(records) for shard, records in values.items()}
            if self._sampling.is_in_doubt(there):
                self._sampling.population = await self._population()
            self._sampling.saw(there)
            sizes = [len(value) for records in values.values() for value in records]
            self._rest_s = self.config.rest_s(len(keys), sizes, self.crowd)
        self._update()
        await self._remember()

    def _enough(self, keys: Mapping[Shard, bytes]) -> Enough | None:
        """Return the condition that ends a read of these keys early; None if every peer that keeps them must be asked."""
        now = self._now()
        others = {peer: known for peer, known in self._peer_table.live.items() if peer != self.network.peer_id}
        fresh_until = now + self.config.fresh_s(self.crowd)
        overdue = any(known.expires_at < fresh_until - self.config.max_read_s for known in others.values())
        # nothing has changed for so long that reads have their longest period
        seldom = self._calm > 1.0 and self.config.read_period_s(self.crowd) * self._calm >= self.config.max_read_s
        calm = seldom and not overdue and not self._peer_table.suspects(now)
        enough_at = self._sampling.enough(others.keys(), fresh_until, calm=calm)
        if enough_at is None:
            return None
        shards_at = {key: shard for shard, key in keys.items()}
        return lambda key, records: enough_at(shards_at[key], records)

    async def _population(self) -> float:
        """Return the estimated number of peers in the DHT, or the last known one if it does not answer.

        It is independent of the sample: a stranger's many identities near the sample's end do not raise it.
        """
        try:
            return await self._on_dht(GET, self.network.dht.population())
        except (SwarmnodeError, asyncio.TimeoutError) as error:
            logger.debug("cannot tell how large the table is: %s", error or "no answer")
            return self._sampling.population

    def _observe(self, values: Sequence[bytes]) -> list[Announcement]:
        """Take in records; invalid ones are ignored. Returns the announcements that are neither expired nor a goodbye."""
        there = []
        for value in values:
            try:
                announcement = self._read(value)
                if announcement.peer != self.network.peer_id:
                    self._check(announcement)
            except ProtocolError as error:
                logger.debug("ignored a record: %s", error)
                continue
            if announcement.peer != self.network.peer_id:
                if self._peer_table.observe(announcement):
                    ahead_s, known_s = announcement.issued_at - self._now(), self.clock_offsets.get(announcement.peer)
                    self.clock_offsets[announcement.peer] = ahead_s if known_s is None else max(known_s, ahead_s)
            elif announcement.sequence > self._sequence:  # from an earlier run whose clock was ahead
                self._sequence, self._expires_at = announcement.sequence, announcement.expires_at
                self._speak.set()
            if announcement.life is not State.OFFLINE and announcement.expires_at > self._now():
                there.append(announcement)
        return there

    def _update(self) -> None:
        """Recompute the live peers, and wake all waiters if they changed."""
        if self._peer_table.update(self._now()):
            self.revision += 1
            self._moved.set()
            self._moved = asyncio.Event()

    async def _read_forever(self) -> None:
        """Read often while peers change, ever more slowly while they do not, and at once after a failure."""
        while not self._closed:
            # at most until the next announcement expires, so that no dead peer stays in the view; in a large swarm some
            # announcement of the sample is always about to expire
            period_s = min(self.config.read_period_s(self.crowd) * self._calm, self.config.max_read_s)
            if not self._sampling.large:
                others = (peer for peer in self._peer_table.live.values() if peer is not self._own)
                period_s = min([period_s, *(peer.expires_at - self._now() for peer in others)])
            await self._pause(self._wake, max(0.05, period_s, self._rest_s))
            self._wake.clear()
            await self.refresh()
            seen = frozenset(
                (peer.peer, peer.state, peer.span, peer.step_load) for peer in self._peer_table.live.values()
            )
            self._calm = self._calm * self.config.calm_growth if seen == self._seen else 1.0
            self._seen = seen

    async def _publish_forever(self) -> None:
        while not self._closed:
            self._speak.clear()
            stored = self._own is None or await self._publish()
            await self._pause(self._speak, self._publish_period_s() if stored else self.config.retry_s)

    async def _pause(self, urgent: asyncio.Event, delay_s: float) -> None:
        """Wait until `urgent` is set, at most `delay_s` seconds."""
        await until_first(self._sleep(delay_s), urgent.wait())

    def _publish_period_s(self) -> float:
        return self.config.publish_period_s(self.crowd)

    def _stamp(self, announcement: Announcement) -> Announcement:
        """Return the announcement with new times. Its expiry grows, within `MAX_LIFE_S`: a DHT keeps the latest expiry."""
        now = self._now()
        wanted = max(self._expires_at + 0.001, now + self._publish_period_s() * self.config.life_factor)
        expires_at = min(wanted, now + MAX_LIFE_S)
        sequence = max(self._sequence + 1, int(now * 1000))
        return msgspec.structs.replace(announcement, sequence=sequence, issued_at=now, expires_at=expires_at)

    async def _publish(self) -> bool:
        """Sign and store the own announcement. Returns whether all of its shards were stored."""
        assert self._own is not None and self._sign is not None
        self._own = own = self._stamp(self._own)
        self._sequence, self._expires_at = own.sequence, own.expires_at
        self._peer_table.observe(own)
        self._update()
        if self._sampling.large:  # readers know few of the measured peers, but all coordinates
            own = msgspec.structs.replace(own, rtt_us={})
        own = msgspec.structs.replace(own, left=self._stood if self._stood != own.span else (0, 0))
        record = sign_announcement(own, self._sign, self._certificate)
        belongs = frozenset(self._sampling.own_shards(own.peer, own.span))
        stores = [self._store(shard, record, own) for shard in sorted(belongs | self._stored)]  # and its former places
        self._stored, self._stood = belongs, own.span
        return all(await asyncio.gather(*stores))

    async def _store(self, shard: Shard, record: bytes, own: Announcement) -> bool:
        key, subkey = shard.key(self.swarm_id), own.peer.encode()
        try:
            return await self._on_dht(STORE, self.network.dht.store(key, subkey, record, expires_at=own.expires_at))
        except (SwarmnodeError, asyncio.TimeoutError) as error:
            logger.warning("cannot publish this peer's announcement: %s", error or "no answer")
            return False

    async def _on_dht(self, operation: str, work: Awaitable[T]) -> T:
        """Wait for a DHT operation and return its result. Raises TimeoutError after `dht_timeout_s`."""
        with self.dht_meter.timing(operation):
            return await asyncio.wait_for(work, self.config.dht_timeout_s)

    async def _remember(self) -> None:
        """Keep the addresses of live peers for the next run."""
        if self.known_peers is None or self._now() < self._next_save_at:
            return
        self._next_save_at = self._now() + self.config.save_s
        self.known_peers.remember(self.peers().values(), self._now(), own=self.network.peer_id)
        await self._save()

    async def _save(self) -> None:
        if self.known_peers is not None:
            await asyncio.to_thread(self.known_peers.save)
