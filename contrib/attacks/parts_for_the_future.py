"""A volunteer sends a stage 256 MiB of parts of all-reduces that are far ahead, so that the stage keeps them all."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from pathlib import Path

from attack import Outcome, main

from swarmnode.codec.tensors import Codec, DType, TensorInfo
from swarmnode.codec.training_messages import MAX_PULLED, Part, Pull
from swarmnode.errors import PeerError
from tests.training.scene import RUN, TERM, Scene

VIRTUAL, FAST = True, True
PART_BYTES, PARTS = 1 << 20, 256
MOST_BYTES = 2 << 20


async def attack() -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        async with Scene(Path(folder)) as scene:
            line = await scene.lead()
            pulls = scene.stage._all_reducer._early
            info = TensorInfo(Codec.NONE, DType.FLOAT32, (PART_BYTES // 4,))
            sent, most_bytes = 0, 0
            for number in range(PARTS):
                talk = await scene.talk(1)
                with contextlib.suppress(PeerError):
                    talk.send(Pull(TERM + 1, 1 << 39, number + 1, RUN.id, MAX_PULLED, MAX_PULLED))
                    talk.send(Part(0, 0, number, False, (info,), RUN.id), [bytes(PART_BYTES)])
                    sent += 1
                await asyncio.sleep(0.01)
                most_bytes = max(most_bytes, scene.stage.switchboard.ledger.used_bytes)
            alive = await scene.feed(0)
            return Outcome(
                most_bytes <= MOST_BYTES and line.channel is not None and line.channel.open,
                f"{sent} MiB sent, {most_bytes} bytes kept of them ({pulls!r}); a microbatch is answered by {type(alive).__name__}",
            )


main(__name__, attack, virtual=VIRTUAL)
