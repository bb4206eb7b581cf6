"""A volunteer reports gradient squares that are invalid, or so large that clipping would remove all peers' updates."""

from __future__ import annotations

import math

from attack import Outcome, main
from training_liar import train_against

from tests.training.test_liars import Liar, squares

VIRTUAL, FAST = True, False
SQUARES = (-1.0, math.nan, math.inf, 1e300, 1e190)


async def attack() -> Outcome:
    outcomes = []
    for square in SQUARES:
        liar = Liar(squares(square))
        outcomes.append(await train_against(liar, what=lambda told=square, liar=liar: f"{liar.lies} times {told:g}"))
    return Outcome(all(outcome.held for outcome in outcomes), "; ".join(outcome.happened for outcome in outcomes))


main(__name__, attack, virtual=VIRTUAL)
