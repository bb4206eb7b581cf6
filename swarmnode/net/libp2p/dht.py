"""The DHT of the real network: the table of `net/table` over p2pd's calls."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from swarmnode.errors import NetworkDown
from swarmnode.net.interfaces import MAX_RECORD_BYTES, Dht, Enough, PeerId, Record, RecordValidator
from swarmnode.net.libp2p.from_hivemind import P2P
from swarmnode.net.libp2p.peers import AddressGroups
from swarmnode.net.libp2p.table_calls import TableCalls
from swarmnode.net.limits.address_group import Claimant
from swarmnode.net.table.keepers import REPLICAS, Keepers, Population
from swarmnode.net.table.lookup import EnoughThere, LookUp, Records
from swarmnode.net.table.record_store import RecordStore
from swarmnode.net.table.routing_table import BUCKET_PEERS, RoutingTable, id_bytes, key_id, node_id

log = logging.getLogger(__name__)

MAX_CLOCK_SKEW_S = 3.0
MAX_WARNINGS = 8  # of clocks: the peers with another time may be many

T = TypeVar("T")


class EngineDht(Dht):
    """Part of one peer in the DHT. Each restart of p2pd brings a new routing table and new calls; stored records and known
    keepers stay."""

    def __init__(
        self,
        valid: RecordValidator | None,
        groups: AddressGroups,
        *,
        client_mode: bool,
        timeout_s: float,
        unix: Callable[[], float] = time.time,
    ) -> None:
        self._valid = valid
        self._groups = groups
        self._client_mode = client_mode
        self._timeout_s = timeout_s
        self._store = RecordStore(unix)
        self._keepers = Keepers()
        self._population = Population()
        self._peer: PeerId = ""
        self._routing_table = RoutingTable("")
        self._calls: TableCalls | None = None
        self._stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._skewed: set[PeerId] = set()

    def __repr__(self) -> str:
        if self._calls is None:
            return "<EngineDht down>"
        return f"<EngineDht knows {len(self._routing_table)} peers, keeps {len(self._store)} keys>"

    async def start(self, p2p: P2P) -> None:
        """Start to take part in the DHT, over the connections of a running p2pd."""
        self._peer = p2p.peer_id.to_base58()
        self._routing_table = RoutingTable(self._peer)
        calls = TableCalls(
            p2p,
            self._store,
            self._routing_table,
            self._valid,
            self._groups,
            client_mode=self._client_mode,
            timeout_s=self._timeout_s,
        )
        await calls.serve()
        self._calls = calls
        self._stopped = asyncio.get_running_loop().create_future()

    async def stop(self) -> None:
        """End all calls of the DHT, as p2pd has ended."""
        calls, self._calls = self._calls, None
        if calls is not None:
            self._stopped.set_result(None)
            await calls.close()

    async def meet(self, peer: PeerId) -> bool:
        """Ask a connected peer for its place in the table. Returns False if it has none or does not answer."""
        asked_at = time.time()
        theirs = await self._running().ping(peer)
        if theirs is not None:
            self._check_clock(peer, theirs, asked_at)
        return theirs is not None

    def neighbours(self) -> set[PeerId]:
        """Return the peers in the routing table; empty while p2pd is down."""
        return self._routing_table.peers() if self._calls is not None else set()

    async def explore(self) -> None:
        """Look for the neighbours in the table, starting with the known peers. Does nothing while p2pd is down."""
        if self._calls is not None:
            await self._look_up({node_id(self._peer): {}})

    def _check_clock(self, peer: PeerId, theirs: float, asked_at: float) -> None:
        ahead_s = max(0.0, asked_at - theirs) + min(0.0, time.time() - theirs)
        if abs(ahead_s) > MAX_CLOCK_SKEW_S and peer not in self._skewed and len(self._skewed) < MAX_WARNINGS:
            self._skewed.add(peer)
            log.warning(
                "this machine's clock is %.0f s %s that of peer %s; records may be refused or expire early: "
                "check the time of both machines (NTP)",
                abs(ahead_s),
                "ahead of" if ahead_s > 0 else "behind",
                peer,
            )

    async def store(self, key: bytes, subkey: bytes, value: bytes, *, expires_at: float) -> bool:
        self._running()
        place = key_id(key)
        believed = self._valid is None or self._valid(id_bytes(place), subkey, value, expires_at)
        if not believed or len(value) > MAX_RECORD_BYTES:
            return False
        return await self._while_running(self._store_at_keepers(place, subkey, Record(value, expires_at)))

    async def _store_at_keepers(self, key: int, subkey: bytes, record: Record) -> bool:
        keepers = await self._keepers.of(key, self._find_keepers)
        calls = self._running()
        answers = await asyncio.gather(*(calls.store(keeper, key, [(subkey, record)]) for keeper in keepers))
        if not all(answers):  # None: the keeper is gone
            self._keepers.forget(key)
        taken = any(answer is not None and any(answer) for answer in answers)
        # This peer is a keeper, too, if there are few, so that peers that ask it find the record. Otherwise it is not:
        # a reader would take a key with this record alone for complete.
        farthest = max((node_id(keeper) ^ key for keeper in keepers), default=0)
        ours = len(keepers) < REPLICAS or node_id(self._peer) ^ key < farthest
        own = Claimant("", self._peer)
        return taken and (not ours or self._store.store(key, subkey, record.value, record.expires_at, own))

    async def _find_keepers(self, key: int) -> Sequence[PeerId]:
        return (await self._look_up({key: {}})).nearest(key, REPLICAS)

    async def get(
        self, keys: Sequence[bytes], *, enough: Enough | None = None
    ) -> Mapping[bytes, Mapping[bytes, Record]]:
        self._running()
        keys_at = {key_id(key): key for key in keys}
        kept = {place: self._store.get(place) for place in keys_at}
        is_enough = None if enough is None else lambda place, records: enough(keys_at[place], records)
        found = await self._while_running(self._look_up(kept, is_enough))
        return {key: self._believed(place, found.records(place)) for place, key in keys_at.items()}

    def _believed(self, key: int, records: Mapping[bytes, Record]) -> dict[bytes, Record]:
        """Return the records that are still valid, this peer's own included: a membership may have ended a moment ago."""
        valid, digest = self._valid, id_bytes(key)
        return {
            subkey: record
            for subkey, record in records.items()
            if valid is None or valid(digest, subkey, record.value, record.expires_at)
        }

    async def population(self) -> float:
        self._running()
        place = self._population.next_place()
        found = await self._while_running(self._look_up({place: {}}))
        self._population.saw(place, found.nearest(place, BUCKET_PEERS))
        return self._population.peers

    async def _look_up(self, kept: Mapping[int, Records], enough: EnoughThere | None = None) -> LookUp:
        calls = self._running()
        return await LookUp(
            self._peer, kept, self._routing_table.nearest, calls.find, self._groups.of, enough=enough
        ).run()

    async def _while_running(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`. hivemind's calls hang if p2pd ends meanwhile: raises NetworkDown instead."""
        task = asyncio.ensure_future(work)
        either: set[asyncio.Future[Any]] = {task, self._stopped}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise NetworkDown("p2pd ended in the middle of an operation on the DHT; the node starts it again")
            return task.result()
        finally:
            task.cancel()

    def _running(self) -> TableCalls:
        if self._calls is None:
            raise NetworkDown("p2pd is not running; the node starts it again")
        return self._calls
