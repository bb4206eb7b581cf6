"""A volunteer in the middle of a model computes and signs rightly, and sends its gradients times -1, so that the run unlearns."""

from __future__ import annotations

import tempfile
from pathlib import Path

from attack import Outcome, main

from swarmnode.codec.frames import FrameKind
from tests.training.test_false_exchanges import LIAR, Scales, join_with_liar, shunned_by_honest
from tests.training.test_hangs import Scenario
from tests.training.test_spot_checks import train

VIRTUAL, FAST = True, False
STEPS, SHARE = 50, 0.03


async def attack() -> Outcome:
    sender = Scales(FrameKind.BACKWARD, -1.0)
    lies: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        scene = Scenario(Path(folder), {LIAR: sender})
        scene.on_step = lambda _step: lies.append(sender.lies)
        try:
            volunteers = await join_with_liar(scene, SHARE)
            await train(scene, steps=STEPS)
        finally:
            await scene.swarm.close()
        honest = len(shunned_by_honest(volunteers) - {LIAR})
        return Outcome(
            0 < sender.lies == lies[STEPS // 2] and not honest,
            f"checks for {SHARE:.0%} of the passes: its last of {sender.lies} lies was in step {lies.index(sender.lies)} of "
            f"{STEPS}, honest stages that are shunned: {honest}",
        )


main(__name__, attack, virtual=VIRTUAL)
