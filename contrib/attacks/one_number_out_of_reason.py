"""A volunteer puts one finite, huge number into activations or gradients, so that it overflows in an honest stage."""

from __future__ import annotations

from functools import partial

from attack import Outcome, main
from training_liar import EVERY, FEW, lie_in

from tests.training.test_not_finite import OneNumber

VIRTUAL, FAST = True, True
LIE = partial(OneNumber, number=3e38)


async def attack() -> Outcome:
    return await lie_in(FEW, LIE)


async def attack_everywhere() -> Outcome:
    return await lie_in(EVERY, LIE)


main(__name__, attack_everywhere, virtual=VIRTUAL)
