"""A replica, one of four, adds false values to its gradients and signs for them, so that all learn them."""

from __future__ import annotations

import tempfile
from pathlib import Path

from _pytest.monkeypatch import MonkeyPatch
from attack import Outcome, main

from tests.training.test_hangs import Scenario
from tests.training.test_spot_checks import join, make_false, train

VIRTUAL, FAST = True, False
STEPS, SHARE = 50, 0.03


async def attack() -> Outcome:
    with tempfile.TemporaryDirectory() as folder, MonkeyPatch.context() as patch:
        scene = Scenario(Path(folder))
        found_at: list[int] = []
        *honest, liar = await join(scene, *[(0, 3)] * 4, share=SHARE)
        make_false(patch, liar, adds=lambda gradient_N: 1.02 * gradient_N)

        def note(step: int) -> None:
            if any(liar.peer in volunteer.standing.proved for volunteer in honest):
                found_at.append(step)

        scene.on_step = note
        try:
            await train(scene, steps=STEPS)
        finally:
            await scene.swarm.close()
        left_out = scene.left_out  # type: ignore[attr-defined]
        return Outcome(
            left_out == {liar.peer},
            f"checks for {SHARE:.0%} of the passes: found by step {min(found_at, default=STEPS)}, left out: "
            f"{'it alone' if left_out == {liar.peer} else len(left_out)}",
        )


main(__name__, attack, virtual=VIRTUAL)
