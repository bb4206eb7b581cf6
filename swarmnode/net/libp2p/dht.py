"""The DHT of the real network: hivemind's Kademlia table with bounds on what strangers may put into it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from swarmnode.errors import NetworkDown
from swarmnode.net.interfaces import MAX_RECORD_BYTES, Dht, PeerId, Record, RecordValidator
from swarmnode.net.libp2p.from_hivemind import (
    DHTID,
    P2P,
    DHTLocalStorage,
    DHTNode,
    DHTRecord,
    DictionaryDHTValue,
    MSGPackSerializer,
    PeerID,
    RecordValidatorBase,
    dht_pb2,
)
from swarmnode.net.libp2p.nearest_peers import REPLICAS, NearestPeers

log = logging.getLogger(__name__)

BUCKET_PEERS = 8  # Kademlia's k, as BitTorrent has it: with hivemind's 20 a look-up asks 20 peers at least
MAX_KEYS = 512
MAX_SUBKEYS = 512  # per key
MAX_CLOCK_SKEW_S = 3.0

T = TypeVar("T")


class EngineDht(Dht):
    """A peer's place in the table. The hivemind node below is a new one after each restart of p2pd, the records stay."""

    def __init__(self, valid: RecordValidator | None, *, client_mode: bool, timeout_s: float) -> None:
        self._validator = _Validator(valid)
        self._client_mode = client_mode
        self._timeout_s = timeout_s
        self._id = DHTID.generate()
        self._storage = _BoundedStorage()
        self._node: Any = None
        self._nearest_peers = NearestPeers()
        self._stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._skewed: set[PeerId] = set()

    def __repr__(self) -> str:
        if self._node is None:
            return "<EngineDht down>"
        return f"<EngineDht knows {len(self._node.protocol.routing_table.uid_to_peer_id)} peers, keeps {len(self._storage)} keys>"

    async def start(self, p2p: P2P) -> None:
        """Take part through a running p2pd."""
        node = await DHTNode.create(
            p2p=p2p,
            node_id=self._id,
            client_mode=self._client_mode,
            bucket_size=BUCKET_PEERS,
            num_replicas=REPLICAS,
            wait_timeout=self._timeout_s,
            record_validator=self._validator,
            cache_locally=False,  # readers want what is true now
            cache_nearest=0,
            cache_on_store=False,
            cache_refresh_before_expiry=0,
        )
        node.protocol.storage = self._storage
        node.protocol._validate_dictionary = self._validator.keep_valid
        self._node = node
        self._stopped = asyncio.get_running_loop().create_future()

    def stop(self) -> None:
        """p2pd is gone."""
        if self._node is not None:
            self._node.is_alive = False
            self._node = None
            self._stopped.set_result(None)

    async def meet(self, peer: PeerId) -> bool:
        """Ask a connected peer for its place in the table. False where it has none."""
        node = self._running()
        target = PeerID.from_base58(peer)
        question = dht_pb2.PingRequest(peer=node.protocol.node_info)
        try:
            asked_at = time.time()
            answer = await node.protocol.get_stub(target).rpc_ping(question, timeout=self._timeout_s)
        except Exception as error:  # hivemind raises many kinds, asyncio's and the other side's among them
            log.debug("peer %s is not in the DHT: %s", peer, error)
            return False
        if not answer.peer.node_id:
            return False
        self._check_clock(peer, answer.dht_time, asked_at)
        await node.protocol.update_routing_table(DHTID.from_bytes(answer.peer.node_id), target, responded=True)
        return True

    def neighbours(self) -> set[PeerId]:
        """The peers that the table here has a place for."""
        known = {} if self._node is None else self._node.protocol.routing_table.uid_to_peer_id
        return {peer.to_base58() for peer in known.values()}

    async def explore(self) -> None:
        """Learn our neighbourhood in the table from the peers that we have met."""
        if self._node is not None:
            await self._node.find_nearest_nodes([self._id])

    def _check_clock(self, peer: PeerId, theirs: float, asked_at: float) -> None:
        ahead_s = max(0.0, asked_at - theirs) + min(0.0, time.time() - theirs)
        if abs(ahead_s) > MAX_CLOCK_SKEW_S and peer not in self._skewed:
            self._skewed.add(peer)
            log.warning(
                "this machine's clock is %.0f s %s that of peer %s; records may be refused or expire early: "
                "check the time of both machines (NTP)",
                abs(ahead_s),
                "ahead of" if ahead_s > 0 else "behind",
                peer,
            )

    async def store(self, key: bytes, subkey: bytes, value: bytes, *, expires_at: float) -> bool:
        node = self._running()
        packed = MSGPackSerializer.dumps(value)
        record = DHTRecord(b"", MSGPackSerializer.dumps(subkey), packed, expires_at)
        if not self._validator.validate(record):
            return False
        key_id = DHTID.generate(source=key)
        taken, ours = await self._while_running(self._nearest_peers.store(node, key_id, subkey, packed, expires_at))
        # Where there are few keepers we are one, so that whoever asks us finds it. Where there are enough we are not: a
        # reader who came upon a key with this record alone would take it for all.
        return taken and (not ours or self._storage.store_subkey(key_id, subkey, packed, expires_at))

    async def get(self, keys: Sequence[bytes], *, thrifty: bool = False) -> Mapping[bytes, Mapping[bytes, Record]]:
        enough = time.time() if thrifty else float("inf")  # an answer with a record that lives now ends the search
        finding = self._running().get_many(list(keys), sufficient_expiration_time=enough)
        found = await self._while_running(finding)
        return {key: _records(found.get(key)) for key in keys}

    async def _while_running(self, work: Coroutine[Any, Any, T]) -> T:
        """hivemind's calls hang where p2pd dies under them: raise NetworkDown instead."""
        task = asyncio.ensure_future(work)
        either: set[asyncio.Future[Any]] = {task, self._stopped}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise NetworkDown("p2pd ended in the middle of it")
            return task.result()
        finally:
            task.cancel()

    def _running(self) -> Any:
        if self._node is None:
            raise NetworkDown("p2pd is not running")
        return self._node


def _records(found: Any) -> dict[bytes, Record]:
    entries = getattr(found, "value", None)
    if not isinstance(entries, Mapping):
        return {}
    return {
        subkey: Record(entry.value, entry.expiration_time)
        for subkey, entry in entries.items()
        if isinstance(subkey, bytes) and isinstance(entry.value, bytes)
    }


class _Validator(RecordValidatorBase):
    """hivemind's question put to our callable. Keys come as their hashes: what is believed rests on the value alone."""

    def __init__(self, valid: RecordValidator | None) -> None:
        self._valid = valid

    def validate(self, record: DHTRecord) -> bool:
        if len(record.value) > MAX_RECORD_BYTES:
            return False
        try:
            subkey, value = MSGPackSerializer.loads(record.subkey), MSGPackSerializer.loads(record.value)
        except Exception as error:  # msgpack raises many kinds on bytes of strangers
            log.debug("refused a DHT record that cannot be read: %s", error)
            return False
        if not isinstance(subkey, bytes) or not isinstance(value, bytes):
            return False
        return self._valid is None or self._valid(record.key, subkey, value, record.expiration_time)

    def keep_valid(self, key: bytes, entries: DictionaryDHTValue) -> bool:
        """Drop what does not hold, and go on with the rest: hivemind would refuse all that a key has for a single record which
        its keeper took in good faith, as one of a peer that was a member until a moment ago."""
        for subkey, (value, expires_at) in list(entries.items()):
            if not self.validate(DHTRecord(key, MSGPackSerializer.dumps(subkey), value, expires_at)):
                del entries[subkey]
        return bool(entries)


class _BoundedStorage(DHTLocalStorage):
    """Records kept for everybody. Where it is full, new ones are refused: evicting would let strangers push out what is true."""

    def store_subkey(self, key: DHTID, subkey: Any, value: bytes, expiration_time: float) -> bool:
        known = self.get(key)
        if known is None:
            full = len(self) >= MAX_KEYS
        else:
            entries = known.value
            full = isinstance(entries, DictionaryDHTValue) and subkey not in entries and len(entries) >= MAX_SUBKEYS
        return not full and bool(super().store_subkey(key, subkey, value, expiration_time))
