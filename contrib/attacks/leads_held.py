"""A peer claims again and again to lead a training, in conversations that it never ends, to fill a stage's memory."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from attack import Outcome, main

from swarmnode.codec.training_messages import Lead
from swarmnode.training.coordinator.worker_group import CLAIM_S
from tests.training.scene import KEY, TERM, Scene

VIRTUAL, FAST = True, True
CLAIMS = 1000


async def attack() -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        async with Scene(Path(folder)) as scene:
            await scene.lead()
            for _ in range(CLAIMS):
                (await scene.talk(1)).send(Lead(TERM - 1, KEY))
            await asyncio.sleep(1)
            most = sum(len(line.channels) for line in scene.stage.switchboard._incoming)
            await asyncio.sleep(CLAIM_S + 1)
            left = sum(len(line.channels) for line in scene.stage.switchboard._incoming)
    return Outcome(most <= 2 and left == 0, f"of {CLAIMS} conversations {most} were open, {left} after {CLAIM_S:.0f} s")


main(__name__, attack, virtual=VIRTUAL)
