"""A stranger stores late-expiring records in the caches of an open swarm's peers, so that readers see the stranger alone."""

from __future__ import annotations

import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

from attack import Outcome, main

from swarmnode.net.identity import Identity, verify
from swarmnode.net.kademlia import id_bytes, key_id
from swarmnode.net.libp2p.dht import STORE
from swarmnode.net.libp2p.engine import Engine, EngineConfig
from swarmnode.net.libp2p.from_hivemind import PeerID, dht_pb2
from swarmnode.swarm.peers.record_validation import record_validator
from swarmnode.swarm.peers.shards import SAMPLE
from swarmnode.swarm.records.announcement import VERSION, Announcement, sign_announcement

VIRTUAL, FAST = False, False
SWARM = bytes(32)
PEERS = 5
KEY = SAMPLE.key(SWARM)


def record(identity: Identity, life_s: float) -> tuple[bytes, bytes, float]:
    now = time.time()
    said = Announcement(VERSION, SWARM, identity.peer_id, int(now * 1000), now, now + life_s, now)
    return identity.peer_id.encode(), sign_announcement(said, identity.sign), now + life_s


async def attack() -> Outcome:
    async with AsyncExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory()))

        async def join(name: str) -> tuple[Engine, Identity]:
            identity = Identity.load_or_create(folder / name)
            valid = record_validator(SWARM, verify, time.time)
            engine = await Engine.start(EngineConfig(folder / name, record_validator=valid))
            ends.push_async_callback(engine.close)
            return engine, identity

        door, _ = await join("door")
        peers = [await join(f"peer {number}") for number in range(PEERS)]
        stranger, forged = await join("stranger")
        for engine, _ in (*peers, (stranger, forged)):
            await engine.connect(await door.addresses(), timeout_s=10)
        for engine, identity in peers:
            subkey, value, expires_at = record(identity, 60)
            await engine.dht.store(KEY, subkey, value, expires_at=expires_at)

        taken = 0
        subkey, value, expires_at = record(forged, 600)
        for engine, _ in (*peers, (door, None)):
            for regular in (False, True):
                rows = dht_pb2.StoreRequest(
                    keys=[id_bytes(key_id(KEY))],
                    subkeys=[
                        b"\xc0" if regular else subkey
                    ],  # msgpack's nil stood for "no dictionary, this value alone"
                    values=[value],
                    expiration_time=[expires_at + 1e6 * regular],
                    in_cache=[True],
                )
                target = PeerID.from_base58(engine.peer_id)
                answer = await stranger._p2p.call_protobuf_handler(target, STORE, rows, dht_pb2.StoreResponse)
                taken += sum(answer.store_ok)

        reader, _ = await join("newcomer")
        await reader.connect(await door.addresses(), timeout_s=10)
        wanted = {identity.peer_id.encode() for _, identity in peers}
        seen = [
            len(wanted & set((await each.dht.get([KEY]))[KEY])) for each in (reader, *(engine for engine, _ in peers))
        ]
        return Outcome(
            min(seen) == PEERS,
            f"{taken} records of the stranger taken; readers see {min(seen)} of {PEERS} peers at least",
        )


main(__name__, attack, virtual=VIRTUAL)
