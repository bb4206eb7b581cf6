"""Four peers send a node their training states for backup as slowly as it allows, so that it takes no other peer's."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

from attack import Outcome, main

from swarmnode.checkpoints.state_backups import AT_ONCE, RETRY_S, TURN_S
from swarmnode.errors import PeerRefused
from swarmnode.net.tasks import cancel_and_wait
from tests.checkpoints.test_backups import World, Writer

VIRTUAL, FAST = True, True
STATE_BYTES, CHUNK_S = 16 << 20, 25.0  # a chunk is due within 30 s
WAITS = 10


async def attack() -> Outcome:
    loop = asyncio.get_running_loop()
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder), None, clock=loop.time)
        await world.keeper.start()
        slow = [await _slow_writer(world, f"slow {number}") for number in range(AT_ONCE)]
        attacks = [asyncio.create_task(_insist(writer)) for writer in slow]
        await asyncio.sleep(1)
        honest, waited_s = await world.writer("honest"), 0.0
        state = honest.keeps(10, 2)
        for _ in range(WAITS):
            try:
                began_s = loop.time()
                await honest.back_up(state)
                break
            except PeerRefused as error:
                await asyncio.sleep(error.retry_s or RETRY_S)
                waited_s += loop.time() - began_s
        kept_bytes = world.keeper.received_bytes
        await cancel_and_wait(*attacks)
        await world.close()
    return Outcome(
        kept_bytes >= state.size and waited_s <= TURN_S + RETRY_S,
        f"{AT_ONCE} give {STATE_BYTES >> 20} MiB each, a chunk in {CHUNK_S:.0f} s; somebody else's state was kept "
        f"after {waited_s:.0f} s",
    )


async def _slow_writer(world: World, name: str) -> Writer:
    writer = await world.writer(name)
    send = writer.server._send

    async def slowly(*asked: Any) -> Any:
        await asyncio.sleep(CHUNK_S)
        return await send(*asked)

    setattr(writer.server, "_send", slowly)  # noqa: B010
    return writer


async def _insist(writer: Writer) -> None:
    """Back up the state of `writer` again and again, a second after each refusal."""
    state = writer.keeps(10, 2, STATE_BYTES)
    while True:
        try:
            await writer.back_up(state)
        except PeerRefused:
            await asyncio.sleep(1)


main(__name__, attack, virtual=VIRTUAL)
