"""A stranger asks a bootstrap peer for whole keys again and again, so that short questions make it send megabytes."""

from __future__ import annotations

import asyncio
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

from attack import Outcome, main

from swarmnode.net.addressing.addresses import Claimant
from swarmnode.net.identity import Identity
from swarmnode.net.kademlia import MAX_FIND_KEYS, id_bytes, key_id
from swarmnode.net.libp2p.dht import ANSWERS_BYTES, FIND, MAX_ANSWER_BYTES
from swarmnode.net.libp2p.engine import Engine, EngineConfig
from swarmnode.net.libp2p.from_hivemind import PeerID, dht_pb2

VIRTUAL, FAST = False, False
SUBKEYS, VALUE = 256, bytes(1024)  # the most announcements that a key holds, at the largest size
SECONDS = 5.0
AT_ONCE = 8  # concurrent questions
PEER_PACE = ANSWERS_BYTES[0]


async def attack() -> Outcome:
    async with AsyncExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory()))

        async def start(name: str) -> Engine:
            Identity.load_or_create(folder / name)
            engine = await Engine.start(EngineConfig(folder / name, client_mode=name != "door"))
            ends.push_async_callback(engine.close)
            return engine

        door, stranger, honest = await start("door"), await start("stranger"), await start("honest")
        for engine in (stranger, honest):
            await engine.connect(await door.addresses(), timeout_s=10)
        keys = [bytes([number]) * 8 for number in range(MAX_FIND_KEYS)]
        store, until = door._dht._store, time.time() + 600
        for key in keys:  # as full as in a large swarm
            for number in range(SUBKEYS):
                assert store.store(key_id(key), b"%d" % number, VALUE, until, Claimant(f"{number}", f"{number}"))

        ends_s, asked, sent, largest = time.monotonic() + SECONDS, 0, 0, 0

        async def ask(wanted: list[bytes]) -> None:
            nonlocal asked, sent, largest
            request = dht_pb2.FindRequest(keys=[id_bytes(key_id(key)) for key in wanted])
            target = PeerID.from_base58(door.peer_id)
            while time.monotonic() < ends_s:
                asked += request.ByteSize()
                try:
                    answer = await stranger._p2p.call_protobuf_handler(target, FIND, request, dht_pb2.FindResponse)
                except Exception:  # refused, in one of hivemind's errors
                    continue
                sent += answer.ByteSize()
                largest = max(largest, answer.ByteSize())

        async def read() -> float:
            slowest_s = 0.0
            while time.monotonic() < ends_s:
                began_s = time.monotonic()
                await honest.dht.get([b"somebody's"])
                slowest_s = max(slowest_s, time.monotonic() - began_s)
                await asyncio.sleep(0.25)
            return slowest_s

        *_, slowest_s = await asyncio.gather(*(ask(keys) for _ in range(AT_ONCE)), ask(512 * keys[:1]), read())
        most = PEER_PACE.at_once + PEER_PACE.per_s * (SECONDS + 2)
        return Outcome(
            sent <= most and largest <= MAX_ANSWER_BYTES + (64 << 10) and slowest_s < 1,
            f"{asked / 1e6:.2f} MB of questions in {SECONDS:.0f} s were answered with {sent / 1e6:.2f} MB; "
            f"another reader waited {slowest_s:.2f} s at most",
        )


main(__name__, attack, virtual=VIRTUAL)
