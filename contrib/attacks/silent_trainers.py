"""Strangers offer themselves as trainers and feed nothing, so that the training waits for their microbatches."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from attack import Outcome, main

from swarmnode.codec.training_messages import Work
from swarmnode.links.link_config import LinkConfig
from swarmnode.links.switchboard import Switchboard
from swarmnode.net.tasks import Tasks
from swarmnode.swarm.records.run import encode_run
from swarmnode.training.worker.training_stage import TRAIN_PROTOCOL
from tests.peer.training_swarm import HELLO
from tests.training.test_hangs import STEPS, Scenario

VIRTUAL, FAST = True, True
STRANGERS, WANT, LINES = 20, 8, 3
PAIRS = (0, 0, 1, 1, 2, 2)
MOST = 20.0  # largest delay in seconds: the wait for trainers that have not fed anything yet


async def trained(strangers: int) -> tuple[float, int]:
    """Train beside `strangers` silent trainers; return the seconds that it took and the number of leases that they got."""
    leases = 0

    def hear(_frame: object, body: object) -> None:
        nonlocal leases
        leases += type(body).__name__ == "Lease"

    with tempfile.TemporaryDirectory() as folder:
        scene = Scenario(Path(folder))
        boards: list[Switchboard] = []
        try:
            await scene.join(*PAIRS)
            leader = scene.swarm.volunteers[0]
            for _ in range(strangers):
                network = scene.swarm.world.join()
                await network.connect(await leader.network.addresses(), timeout_s=1)
                boards.append(Switchboard(network, TRAIN_PROTOCOL, HELLO, LinkConfig()))

            async def offer() -> None:
                for board in boards:
                    for _ in range(LINES):
                        channel = await board.call(leader.peer, hear, lambda _error: None)
                        channel.send(Work(encode_run(scene.run), WANT))

            tasks = Tasks("offers", on_crash=None)
            scene.on_step = lambda step: tasks.spawn(offer(), "offer", awaited=True) if step == 0 else None
            began_s = asyncio.get_running_loop().time()
            await scene.train()
            await tasks.close()
            return asyncio.get_running_loop().time() - began_s, leases
        finally:
            for board in boards:
                await board.close()
            await scene.swarm.close()


async def attack() -> Outcome:
    (alone_s, _), (beside_s, leases) = await trained(0), await trained(STRANGERS)
    return Outcome(
        beside_s < alone_s + MOST,
        f"{STRANGERS} strangers were given {leases} microbatches; {STEPS} steps took {beside_s:.1f} s instead of {alone_s:.1f} s",
    )


main(__name__, attack, virtual=VIRTUAL)
