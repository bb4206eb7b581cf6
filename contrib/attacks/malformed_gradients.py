"""A volunteer sends payloads of half the size, so that the honest stage that decodes them is blamed."""

from __future__ import annotations

from functools import partial

from attack import Outcome, main
from training_liar import EVERY, FEW, lie_in

from tests.training.test_not_finite import OtherSize

VIRTUAL, FAST = True, True
LIE = partial(OtherSize, factor=0.5)


async def attack() -> Outcome:
    return await lie_in(FEW, LIE)


async def attack_everywhere() -> Outcome:
    return await lie_in(EVERY, LIE)


main(__name__, attack_everywhere, virtual=VIRTUAL)
