"""The DHT of the real network: the table of `net/kademlia.py` over p2pd's calls.

The table's calls over p2pd: PING, STORE and FIND, in hivemind's messages.

Data from others is bounded here, and counted for its sender. Only records that are valid under their key are kept. There is no
cache: a keeper gives the records that were stored with it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from swarmnode.codec.body import DECODE_ERRORS
from swarmnode.errors import NetworkDown
from swarmnode.net.addressing.addresses import Claimant
from swarmnode.net.clock import Backoff
from swarmnode.net.fair_share import FairPace, Pace, Recent
from swarmnode.net.interfaces import MAX_RECORD_BYTES, Dht, Enough, PeerId, Record, RecordValidator
from swarmnode.net.kademlia import (
    BUCKET_PEERS,
    ID_BITS,
    MAX_FIND_KEYS,
    MAX_SUBKEYS,
    REPLICAS,
    EnoughThere,
    Keepers,
    KeyAnswer,
    Lookup,
    Population,
    Records,
    RecordStore,
    RoutingTable,
    id_bytes,
    key_id,
    node_id,
)
from swarmnode.net.libp2p.from_hivemind import P2P, dht_pb2
from swarmnode.net.libp2p.p2pd_control import AddressGroups, hivemind_id, peer_bytes, peer_name
from swarmnode.net.network_config import NetworkConfig
from swarmnode.net.tasks import Tasks

log = logging.getLogger(__name__)

PING, STORE, FIND = "Table.ping", "Table.store", "Table.find"
MAX_STORES = 32  # records in one call
MAX_ANSWER_BYTES = 768 * 1024  # together with the neighbours below the 1 MiB that p2pd takes as one message
CALLS = Pace(40, 200), Pace(400, 2000)  # of a peer, of an address group
ANSWERS_BYTES = Pace(128 << 10, 2 << 20), Pace(1 << 20, 16 << 20)
PATIENCE_S = 1.0  # a call that would have to wait longer is refused
FAILED_S, MAX_FAILED_S = 5.0, 80.0  # pause after a call without an answer, doubled up to the maximum
MAX_REMEMBERED = 512  # peers that failed, and peers that were handed their records
KEY_BYTES = ID_BITS // 8

_decoder = msgspec.msgpack.Decoder(list[tuple[bytes, bytes, float]])


class TableCalls:
    """Calls to other peers of the table, and answers to theirs; a client only calls. Made anew with each p2pd."""

    def __init__(
        self,
        p2p: P2P,
        store: RecordStore,
        routing_table: RoutingTable,
        groups: AddressGroups,
        config: NetworkConfig,
        timeout_s: float,
    ) -> None:
        self._p2p, self._store, self._routing_table, self._groups = p2p, store, routing_table, groups
        self._valid, self._client_mode, self._timeout_s = config.record_validator, config.client_mode, timeout_s
        self._calls = FairPace(*CALLS)
        self._answers_bytes = FairPace(*ANSWERS_BYTES)
        self._failed = Backoff(
            time.monotonic, first_s=FAILED_S, ceiling_s=MAX_FAILED_S, forget_s=math.inf, most=MAX_REMEMBERED
        )
        self._handed_over: Recent[PeerId, None] = Recent(MAX_REMEMBERED)
        self._tasks = Tasks("table calls", on_crash=None)
        self._closed = False
        own = b"" if self._client_mode else id_bytes(node_id(p2p.peer_id.to_base58()))
        self._info = dht_pb2.NodeInfo(node_id=own)

    async def serve(self) -> None:
        """Start to answer calls. A client answers none."""
        if self._client_mode:
            return
        for name, answer, request in (
            (PING, self._answer_ping, dht_pb2.PingRequest),
            (STORE, self._answer_store, dht_pb2.StoreRequest),
            (FIND, self._answer_find, dht_pb2.FindRequest),
        ):
            await self._p2p.add_protobuf_handler(name, answer, request)

    async def close(self) -> None:
        """Cancel the tasks in the background."""
        self._closed = True
        await self._tasks.close()

    # -- asking

    async def ping(self, peer: PeerId) -> float | None:
        """Return the clock of a peer (unix time in seconds); None if it has no place in the table or does not answer."""
        answer = await self._call(peer, PING, dht_pb2.PingRequest(peer=self._info), dht_pb2.PingResponse)
        if answer is None or not answer.peer.node_id:
            return None
        return float(answer.dht_time)

    async def store(self, peer: PeerId, key: int, records: Sequence[tuple[bytes, Record]]) -> list[bool] | None:
        """Ask a peer to keep records under a key; return for each record whether it was kept. None if the peer does not answer."""
        request = dht_pb2.StoreRequest(
            keys=[id_bytes(key)] * len(records),
            subkeys=[subkey for subkey, _ in records],
            values=[record.value for _, record in records],
            expiration_time=[record.expires_at for _, record in records],
            peer=self._info,
        )
        answer = await self._call(peer, STORE, request, dht_pb2.StoreResponse)
        return None if answer is None else list(answer.store_ok)

    async def find(self, peer: PeerId, keys: Sequence[int]) -> list[KeyAnswer] | None:
        """Return the peer's valid records under each key and the peers that it knows near the key. None if it does not answer, or
        is left alone after a failure."""
        if self._failed.pause_s(peer):
            return None
        request = dht_pb2.FindRequest(keys=list(map(id_bytes, keys)), peer=self._info)
        answer = await self._call(peer, FIND, request, dht_pb2.FindResponse)
        if answer is None or len(answer.results) != len(keys):
            return None
        await self._groups.learn(peer)
        return [self._read(key, result) for key, result in zip(keys, answer.results, strict=True)]

    def _read(self, key: int, result: Any) -> KeyAnswer:
        nearer = [peer_name(raw) for raw in result.nearest_peer_ids[:BUCKET_PEERS]]
        records: dict[bytes, Record] = {}
        if result.type == dht_pb2.FOUND_DICTIONARY:
            try:
                packed = _decoder.decode(result.value)[:MAX_SUBKEYS]
                records = {subkey: Record(value, expires_at) for subkey, value, expires_at in packed}
            except DECODE_ERRORS as error:
                log.debug("an answer of the table cannot be read: %s", error)
        return KeyAnswer(_believed(self._valid, key, records), [peer for peer in nearer if peer])

    async def _call(self, peer: PeerId, name: str, request: Any, answer_type: type) -> Any:
        try:
            calling = self._p2p.call_protobuf_handler(hivemind_id(peer), name, request, answer_type)
            answer = await asyncio.wait_for(calling, self._timeout_s)
        except Exception as error:  # hivemind raises many kinds of errors: asyncio's, the other side's, its own
            log.debug("peer %s does not answer for the table: %s", peer, error)
            self._routing_table.lost(peer)
            self._failed.failed(peer)
            return None
        self._failed.succeeded(peer)
        if answer.peer.node_id:
            await self._record_contact(peer)
        return answer

    # -- known peers

    async def _record_contact(self, peer: PeerId) -> None:
        """Note a call or answer of a peer of the table: enter it into the routing table, and give a newcomer the records that it
        should keep."""
        group = await self._groups.learn(peer)
        if self._closed:
            return
        new = peer not in self._routing_table
        doubtful = self._routing_table.record_contact(peer, group)
        if doubtful is not None:
            self._tasks.spawn(self.ping(doubtful), f"ask whether {doubtful} lives")
        if new and not self._client_mode and peer not in self._handed_over:
            self._handed_over[peer] = None
            self._tasks.spawn(self._hand_over(peer), f"hand over to {peer}")

    async def _hand_over(self, peer: PeerId) -> None:
        """Give a newcomer the records to whose keys it is among the nearest peers, unless another known peer is nearer than this
        one."""
        own = node_id(self._p2p.peer_id.to_base58())
        due: dict[int, list[tuple[bytes, Record]]] = {}
        for key, subkey, record in list(self._store.items()):
            others = [other for other in self._routing_table.nearest(key, BUCKET_PEERS) if other != peer]
            distances = [node_id(other) ^ key for other in others]
            ours = not distances or own ^ key < distances[0]
            if ours and (len(distances) < BUCKET_PEERS or node_id(peer) ^ key < max(distances)):
                due.setdefault(key, []).append((subkey, record))
        for key, records in due.items():
            for start in range(0, len(records), MAX_STORES):
                if await self.store(peer, key, records[start : start + MAX_STORES]) is None:
                    return

    # -- answering

    async def _admit(self, context: Any, info: Any) -> Claimant:
        """Return the calling peer and its address group. Raises PermissionError if it calls too often."""
        peer: PeerId = context.remote_id.to_base58()
        claimant = Claimant(await self._groups.learn(peer), peer)
        await _await_turn(self._calls, claimant)
        if info.node_id:
            await self._record_contact(peer)
        return claimant

    async def _answer_ping(self, request: dht_pb2.PingRequest, context: Any) -> dht_pb2.PingResponse:
        await self._admit(context, request.peer)
        return dht_pb2.PingResponse(peer=self._info, dht_time=time.time())

    async def _answer_store(self, request: dht_pb2.StoreRequest, context: Any) -> dht_pb2.StoreResponse:
        claimant = await self._admit(context, request.peer)
        rows = list(zip(request.keys, request.subkeys, request.values, request.expiration_time, strict=True))
        if len(rows) > MAX_STORES or any(len(key) != KEY_BYTES for key, *_ in rows):
            raise ValueError(f"more than {MAX_STORES} records, or keys of a wrong length")
        taken = [self._accept_record(int.from_bytes(key, "big"), *rest, claimant=claimant) for key, *rest in rows]
        return dht_pb2.StoreResponse(store_ok=taken, peer=self._info)

    def _accept_record(self, key: int, subkey: bytes, value: bytes, expires_at: float, *, claimant: Claimant) -> bool:
        valid = _believed(self._valid, key, {subkey: Record(value, expires_at)})
        return bool(valid) and self._store.store(key, subkey, value, expires_at, claimant)

    async def _answer_find(self, request: dht_pb2.FindRequest, context: Any) -> dht_pb2.FindResponse:
        claimant = await self._admit(context, request.peer)
        if len(request.keys) > MAX_FIND_KEYS or any(len(key) != KEY_BYTES for key in request.keys):
            raise ValueError(f"more than {MAX_FIND_KEYS} keys, or keys of a wrong length")
        answer = dht_pb2.FindResponse(peer=self._info)
        keys = list(dict.fromkeys(int.from_bytes(raw, "big") for raw in request.keys))
        left_bytes = MAX_ANSWER_BYTES
        for number, key in enumerate(keys):
            result = dht_pb2.FindResult(type=dht_pb2.NOT_FOUND)
            records = self._store.some(key, left_bytes // (len(keys) - number))
            if records:
                rows = [(subkey, record.value, record.expires_at) for subkey, record in records.items()]
                result = dht_pb2.FindResult(type=dht_pb2.FOUND_DICTIONARY, value=msgspec.msgpack.encode(rows))
            nearest = [peer for peer in self._routing_table.nearest(key, BUCKET_PEERS + 1) if peer != claimant.peer]
            result.nearest_peer_ids.extend(peer_bytes(peer) for peer in nearest[:BUCKET_PEERS])
            answer.results.append(result)
            left_bytes -= len(result.value)
        await _await_turn(self._answers_bytes, claimant, answer.ByteSize())
        return answer


def _believed(valid: RecordValidator | None, key: int, records: Records) -> dict[bytes, Record]:
    """Return the records under a key that `valid` accepts; all of them if it is None."""
    digest = id_bytes(key)
    return {
        subkey: record
        for subkey, record in records.items()
        if valid is None or valid(digest, subkey, record.value, record.expires_at)
    }


async def _await_turn(pace: FairPace, claimant: Claimant, amount: float = 1.0) -> None:
    wait_s = pace.wait_s(claimant, amount, within_s=PATIENCE_S)
    if wait_s > PATIENCE_S:
        raise PermissionError("too many calls; slower")
    if wait_s:
        await asyncio.sleep(wait_s)


MAX_CLOCK_SKEW_S = 3.0
MAX_WARNINGS = 8  # of clocks: the peers with another time may be many

T = TypeVar("T")


class EngineDht(Dht):
    """Part of one peer in the DHT. Each restart of p2pd brings a new routing table and new calls; stored records and known
    keepers stay."""

    def __init__(self, config: NetworkConfig, groups: AddressGroups, *, timeout_s: float) -> None:
        self._config = config
        self._valid = config.record_validator
        self._groups = groups
        self._timeout_s = timeout_s
        self._store = RecordStore(config.unix)
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
        calls = TableCalls(p2p, self._store, self._routing_table, self._groups, self._config, self._timeout_s)
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
        return theirs is not None

    def neighbours(self) -> set[PeerId]:
        """Return the peers in the routing table; empty while p2pd is down."""
        return self._routing_table.peers() if self._calls is not None else set()

    async def explore(self) -> None:
        """Look for the neighbours in the table, starting with the known peers. Does nothing while p2pd is down."""
        if self._calls is not None:
            await self._lookup({node_id(self._peer): {}})

    async def store(self, key: bytes, subkey: bytes, value: bytes, *, expires_at: float) -> bool:
        self._running()
        place, record = key_id(key), Record(value, expires_at)
        if len(value) > MAX_RECORD_BYTES or not _believed(self._valid, place, {subkey: record}):
            return False
        return await self._while_running(self._store_at_keepers(place, subkey, record))

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
        return (await self._lookup({key: {}})).nearest(key, REPLICAS)

    async def get(
        self, keys: Sequence[bytes], *, enough: Enough | None = None
    ) -> Mapping[bytes, Mapping[bytes, Record]]:
        self._running()
        keys_at = {key_id(key): key for key in keys}
        kept = {place: self._store.get(place) for place in keys_at}
        is_enough = None if enough is None else lambda place, records: enough(keys_at[place], records)
        found = await self._while_running(self._lookup(kept, is_enough))
        # those that are still valid, this peer's own included: a membership may have ended a moment ago
        return {key: _believed(self._valid, place, found.records(place)) for place, key in keys_at.items()}

    async def population(self) -> float:
        self._running()
        place = self._population.next_place()
        found = await self._while_running(self._lookup({place: {}}))
        self._population.saw(place, found.nearest(place, BUCKET_PEERS))
        return self._population.peers

    async def _lookup(self, own_records: Mapping[int, Records], enough: EnoughThere | None = None) -> Lookup:
        calls = self._running()
        return await Lookup(
            self._peer, own_records, self._routing_table.nearest, calls.find, self._groups.of, enough=enough
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
