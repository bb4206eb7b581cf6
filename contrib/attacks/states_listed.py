"""A client asks a training's stage again and again for states of a later step than there is, so that it writes states."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from attack import Outcome, main

from swarmnode.checkpoints.state_exchange import StateServer, list_states, state_board
from swarmnode.codec.body import VERSION
from swarmnode.codec.messages import Hello
from swarmnode.errors import PeerError
from swarmnode.links.link_config import LinkConfig
from swarmnode.net.interfaces import Network
from swarmnode.net.memory.network import FakeWorld
from swarmnode.swarm.records.run import Run
from swarmnode.swarm.storage.state_store import StateStore

VIRTUAL, FAST = True, True
HELLO = Hello(VERSION, bytes(32))
RUN = Run(data=bytes(32), steps=95, batch=4, microbatch=2)
SNAPSHOT_S, ATTACKED_S, MOST_SHARE = 2.0, 400.0, 0.06
FAR = 1 << 39


async def attack() -> Outcome:
    world, loop = FakeWorld(seed=1), asyncio.get_running_loop()
    victim, client = world.join(), world.join()
    await client.connect(await victim.addresses(), timeout_s=1)
    config, snapshots = LinkConfig(clock=loop.time), 0

    def peer(network: Network) -> Any:
        return SimpleNamespace(network=network, hello=HELLO, link_config=config)

    async def snapshot(_at_least: int) -> int:
        nonlocal snapshots
        snapshots += 1
        await asyncio.sleep(SNAPSHOT_S)
        return snapshots

    with tempfile.TemporaryDirectory() as folder:
        store = StateStore(Path(folder), RUN)
        server = StateServer(peer(victim))
        server.give(store, snapshot)
        await server.serve()
        board = state_board(peer(client))
        asked = 0
        while loop.time() < ATTACKED_S:
            asked += 1
            with contextlib.suppress(PeerError):  # it may be asked less often
                await list_states(board, victim.peer_id, at_least=FAR)
        await board.close()
        await server.close()
        store.close()
    share = snapshots * SNAPSHOT_S / ATTACKED_S
    return Outcome(
        share <= MOST_SHARE, f"of {asked} questions {snapshots} led to a snapshot: {share:.1%} of the stage's time"
    )


main(__name__, attack, virtual=VIRTUAL)
