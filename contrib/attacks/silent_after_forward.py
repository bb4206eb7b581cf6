"""A stage takes microbatches in, answers every PING, and never gives gradients back, so that the step stands still."""

from __future__ import annotations

from attack import Outcome, main
from training_liar import train_against

from tests.training.sabotage import Ill, Saboteur

VIRTUAL, FAST = True, True
FRAMES = 12


async def attack() -> Outcome:
    silent = Saboteur(Ill.PINGS, FRAMES)
    return await train_against(silent, what=lambda: f"silent after {FRAMES} frames", number=3)


main(__name__, attack, virtual=VIRTUAL)
