"""A replica, one of four, sends a longer gradient with the opposite sign, so that a robust training unlearns."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from _pytest.monkeypatch import MonkeyPatch
from attack import Outcome, main

from tests.peer import training_swarm
from tests.peer.training_swarm import local_losses
from tests.training.test_hangs import Scenario
from tests.training.test_robust import LIAR, FalseGradients, WideSegment, train

VIRTUAL, FAST = True, False
STEPS, FACTOR, MOST = 20, -4, 0.02


async def attack() -> Outcome:
    liar = FalseGradients(lambda gradient: np.float32(FACTOR) * gradient)
    with tempfile.TemporaryDirectory() as folder, MonkeyPatch.context() as patch:
        patch.setattr(training_swarm, "ToySegment", WideSegment)
        scene = Scenario(Path(folder), {LIAR: liar})
        try:
            losses, left_out = await train(scene, STEPS)
            peer = scene.swarm.volunteers[LIAR].peer
        finally:
            await scene.swarm.close()
        clean = local_losses(scene.run, scene.batches)
        return Outcome(
            left_out == {peer} and losses[-1] < clean[-1] + MOST * clean[0],
            f"{liar.lies} parts times {FACTOR}: a loss of {losses[-1]:.3f} instead of {clean[-1]:.3f}, "
            f"{'the liar alone is left out' if left_out == {peer} else f'{len(left_out)} are left out'}",
        )


main(__name__, attack, virtual=VIRTUAL)
