"""Two identities come to a unit that one peer holds, and list another state of it, so that joining stages take theirs."""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec
from attack import Outcome, main

from swarmnode.checkpoints.votes import Electorate
from swarmnode.swarm.peers.peer_table import FIRST_LOOK_S, PeerTable
from tests.checkpoints.test_state_transfer import FALSE, World, join_by, ready_at

VIRTUAL, FAST = False, False
STEP = 10
AT = {"lone": "9.9.9.9", "one": "8.8.8.8", "two": "7.7.7.7"}


def seen_by_a_node() -> Electorate:
    """Return the votes of the peers as seen by a node that was there before the two identities came at `STEP`."""
    table = PeerTable()
    for number, name in enumerate(AT):
        announcement = ready_at(**AT)[name]
        table.observe(msgspec.structs.replace(announcement, expires_at=1e9, training_step=STEP))
        table.update(number * (FIRST_LOOK_S + 1))
    return Electorate(table.live, table.ready_after())


async def attack() -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        try:
            for name in AT:
                (await world.peer(name)).has(STEP, 0, version=0 if name == "lone" else FALSE)
            brought = await join_by(world, seen_by_a_node())
        finally:
            await world.close()
    said = {0: "the holder's", FALSE: "that of the two", None: "none"}[brought]
    return Outcome(brought == 0, f"of three that list step {STEP}, the state that a joining stage got is {said}")


main(__name__, attack, virtual=VIRTUAL)
