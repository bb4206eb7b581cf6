"""A peer without a lease feeds a training's stage, or labels it, by copied leases, so that it learns what the peer likes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
from attack import Outcome, main

from swarmnode.codec.messages import Error
from swarmnode.codec.training_messages import Forward, Labels
from swarmnode.errors import ErrorCode
from tests.training.scene import RUN, Scene

VIRTUAL, FAST = True, True


def lies(body: Forward | Labels, *, stranger: str) -> Iterator[Forward | Labels]:
    yield msgspec.structs.replace(body, seal=b"")
    yield msgspec.structs.replace(body, seal=bytes(16))
    yield msgspec.structs.replace(body, feeder=stranger)
    yield body  # an unchanged copy, sent by another peer than its trainer


async def attack() -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        async with Scene(Path(folder)) as scene:
            await scene.lead()
            refused = 0
            for number in range(RUN.microbatches):
                for body, payload in (scene.forward(number, lease=number + 1), scene.labels(number, lease=number + 1)):
                    for lie in lies(body, stranger=scene.networks[1].peer_id):
                        answer = await (await scene.talk(0)).ask(lie, payload)
                        refused += isinstance(answer, Error) or getattr(answer, "code", None) == ErrorCode.REFUSED
            counted = [bin(mask).count("1") for mask in scene.stage.state.masks.values()]
            asked = 2 * 4 * RUN.microbatches
            return Outcome(
                refused == asked and not any(counted),
                f"{refused} of {asked} frames refused, {max(counted)} counted",
            )


main(__name__, attack, virtual=VIRTUAL)
