"""A stranger to a private swarm asks its bootstrap peer by libp2p's own routing (FIND_NODE) for the members' addresses."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

from attack import Outcome, main

from swarmnode.net.identity import Identity
from swarmnode.net.interfaces import PeerId
from swarmnode.net.libp2p.engine import Engine, EngineConfig
from swarmnode.net.libp2p.from_hivemind import PeerID
from swarmnode.net.libp2p.p2pd_control import read_varint, write_varint
from swarmnode.net.network_config import Gate

VIRTUAL, FAST = False, False
NODES, CLIENTS = 3, 2
TIMEOUT_S = 30.0
KAD = "/ipfs/kad/1.0.0"
TYPE, KEY = 1 << 3, 2 << 3 | 2  # protobuf tags of the message fields
FIND_NODE = 4


class MembersOnly(Gate):
    """Gate of a private swarm: only members may call the table."""

    guards_table = True

    def __init__(self, members: set[PeerId]) -> None:
        self._members = members

    def admits(self, peer: PeerId) -> bool:
        return peer in self._members


async def find_node(stranger: Engine, asked: PeerId) -> bytes:
    """Return the raw answer of the peer `asked` to FIND_NODE with the key of `stranger`: the 20 nearest peers, in a small swarm
    all (github.com/libp2p/specs, kad-dht)."""
    key = PeerID.from_base58(stranger.peer_id).to_bytes()
    question = bytes([TYPE, FIND_NODE, KEY, len(key)]) + key
    stream = await stranger._running().open(asked, KAD, timeout_s=TIMEOUT_S)
    stream.write([write_varint(len(question)) + question])
    answer = b""
    while not (found := read_varint(answer))[1] or len(answer) < sum(found):
        answer += await stream.read()
    stream.abort()
    return answer


async def attack() -> Outcome:
    async with AsyncExitStack() as ends:
        folder, members = Path(ends.enter_context(tempfile.TemporaryDirectory())), set[PeerId]()

        async def start(name: str, *, member: bool = True, **options: bool) -> Engine:
            identity = Identity.load_or_create(folder / name)
            if member:
                members.add(identity.peer_id)
            engine = await Engine.start(EngineConfig(folder / name, gate=MembersOnly(members), **options))
            ends.push_async_callback(engine.close)
            return engine

        door = await start("door", public=True)
        nodes = [await start(f"node {number}") for number in range(NODES)]
        clients = [await start(f"client {number}", client_mode=True) for number in range(CLIENTS)]
        stranger = await start("stranger", member=False, client_mode=True)
        for engine in (*nodes, *clients):
            await engine.connect(await door.addresses(), timeout_s=TIMEOUT_S)
        for address in await door.addresses():
            await stranger._running().connect(door.peer_id, address, timeout_s=TIMEOUT_S)
        answer = await asyncio.wait_for(find_node(stranger, door.peer_id), TIMEOUT_S)
        of_nodes, of_clients = (
            sum(PeerID.from_base58(one.peer_id).to_bytes() in answer for one in group) for group in (nodes, clients)
        )
        return Outcome(
            of_nodes == of_clients == 0,
            f"{of_nodes} of {NODES} nodes are named, {of_clients} of {CLIENTS} clients",
            known=of_clients == 0,
        )


main(__name__, attack, virtual=VIRTUAL)
