"""A trainer says of every microbatch that an honest stage sent it NaN, so that the stage is excluded or the run ends for all."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from attack import Outcome, main

from swarmnode.codec.frames import Frame, FrameKind
from swarmnode.codec.messages import KIND_OF, decode_body, encode_body
from swarmnode.codec.training_messages import Done, Failed
from swarmnode.errors import ErrorCode, SwarmnodeError
from tests.peer.training_swarm import until
from tests.training.sabotage import Ill, Saboteur
from tests.training.test_hangs import STEPS, Scenario

VIRTUAL, FAST = True, True
PAIRS = (0, 0, 1, 1, 2, 2)


class Slanderer(Saboteur):
    """Trainer that accuses one stage instead of reporting a microbatch as done."""

    accused = ""

    def instead_of(self, frame: Frame) -> Frame | None:
        if frame.kind != FrameKind.DONE:
            return frame
        done = decode_body(frame.kind, frame.body)
        assert isinstance(done, Done)
        self.count += 1
        told = Failed(done.lease, self.accused, ErrorCode.NOT_FINITE, run=done.run)
        return Frame(KIND_OF[Failed], frame.channel, frame.seq, encode_body(told))


async def attack() -> Outcome:
    slanderer = Slanderer(Ill.PINGS, 0)
    with tempfile.TemporaryDirectory() as folder:
        scene = Scenario(Path(folder), {len(PAIRS): slanderer})
        feeding: asyncio.Future[object] | None = None
        try:
            await scene.join(*PAIRS)
            slanderer.accused = scene.swarm.volunteers[-1].peer
            _, false = await scene.swarm.trainer(scene.run, scene.batches, lambda _report: None)
            feeding = asyncio.ensure_future(false.train(asyncio.Event()))
            await until(lambda: slanderer.count > 3, "it slanders")
            await scene.train()
            came = "the losses of one process"
        except (AssertionError, asyncio.TimeoutError, SwarmnodeError) as error:
            came = str(error)[:80] or "no end"
        finally:
            if feeding is not None:
                feeding.cancel()
                await asyncio.gather(feeding, return_exceptions=True)
            await scene.swarm.close()
    held = came == "the losses of one process"
    return Outcome(held, f"{slanderer.count} claims; {len(scene.losses)} of {STEPS} steps of another trainer: {came}")


main(__name__, attack, virtual=VIRTUAL)
