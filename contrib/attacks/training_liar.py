"""Common part of the attacks by one volunteer of a training: the losses must still be those of one process."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path

from attack import Outcome

from tests.training.sabotage import Saboteur
from tests.training.test_hangs import STEPS, Scenario

PAIRS = (0, 0, 1, 1, 2, 2)  # units of the volunteers: two replicas of each
LIAR = 4  # number of a volunteer that does not coordinate


async def train_against(
    saboteur: Saboteur, *, what: Callable[[], str], number: int = LIAR, units: tuple[int, ...] = PAIRS
) -> Outcome:
    """Train with `saboteur` as volunteer `number`; `units` are the units of the volunteers. `what` returns in words what the
    saboteur did. The outcome is held if all steps were made, with the losses of one process on the same batches."""
    loop = asyncio.get_running_loop()
    with tempfile.TemporaryDirectory() as folder:
        scene = Scenario(Path(folder), {number: saboteur})
        began_s = loop.time()
        try:
            await scene.join(*units)
            await scene.train()
            held, came = True, "the losses of one process"
        except (AssertionError, asyncio.TimeoutError) as error:
            held, came = False, f"{len(scene.losses)} of {STEPS} steps ({str(error)[:80] or 'no end'})"
        finally:
            await scene.swarm.close()
    return Outcome(held, f"{what()}: {came}, after {loop.time() - began_s:.1f} s")
