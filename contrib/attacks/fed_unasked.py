"""A peer without a lease feeds a training's stage, and copies leases of others, so that it learns what the peer likes."""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec
from attack import Outcome, main

from swarmnode.codec.messages import Error
from swarmnode.errors import ErrorCode
from tests.roles.training.scene import RUN, Scene

VIRTUAL, FAST = True, True


async def attack() -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        async with Scene(Path(folder)) as scene:
            await scene.lead()
            refused = 0
            for number in range(RUN.microbatches):
                body, payload = scene.forward(number, lease=number + 1)
                stranger = scene.networks[1].peer_id
                forged = (
                    msgspec.structs.replace(body, seal=b""),
                    msgspec.structs.replace(body, seal=bytes(16)),
                    msgspec.structs.replace(body, feeder=stranger),
                    body,  # copied as it is, from another peer than its trainer
                )
                for lie in forged:
                    answer = await (await scene.talk(0)).ask(lie, payload)
                    refused += isinstance(answer, Error) or getattr(answer, "code", None) == ErrorCode.REFUSED
            counted = [bin(mask).count("1") for mask in scene.stage.state.masks.values()]
            asked = 4 * RUN.microbatches
            return Outcome(
                refused == asked and not any(counted),
                f"{refused} of {asked} microbatches refused, {max(counted)} counted",
            )


main(__name__, attack, virtual=VIRTUAL)
