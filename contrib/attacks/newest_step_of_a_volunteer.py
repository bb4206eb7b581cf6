"""A volunteer of a training claims to have step 2**40 on its disk, so that all others are behind."""

from __future__ import annotations

from attack import Outcome, main
from training_liar import train_against

from tests.training.test_liars import Liar, newest

VIRTUAL, FAST = True, True


async def attack() -> Outcome:
    liar = Liar(newest)
    return await train_against(liar, what=lambda: f"{liar.lies} times step {1 << 40:,}")


main(__name__, attack, virtual=VIRTUAL)
