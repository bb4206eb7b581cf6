"""A volunteer of a training claims again and again that it met NaN, so that the run is stopped."""

from __future__ import annotations

from attack import Outcome, main
from training_liar import train_against

from tests.training.test_liars import Liar, not_finite

VIRTUAL, FAST = True, True


async def attack() -> Outcome:
    liar = Liar(not_finite)
    return await train_against(liar, what=lambda: f"{liar.lies} claims of NaN")


main(__name__, attack, virtual=VIRTUAL)
