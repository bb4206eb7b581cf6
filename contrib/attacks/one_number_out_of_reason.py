"""A volunteer puts one finite, huge number into activations or gradients, so that it overflows in an honest stage."""

from __future__ import annotations

from functools import partial

from attack import Outcome, main
from training_liar import EVERY, FEW, lie_in, train_against

from swarmnode.codec.frames import FrameKind
from tests.training.test_hangs import STEPS
from tests.training.test_not_finite import OneNumber

VIRTUAL, FAST = True, True
LIE = partial(OneNumber, number=3e38)


async def attack() -> Outcome:
    return await lie_in(FEW, LIE)


async def attack_everywhere() -> Outcome:
    refused = await lie_in(EVERY, LIE)
    sender = OneNumber(
        FrameKind.BACKWARD, 4e9
    )  # within the bound, and beyond it behind the honest norm: losses may differ
    within = await train_against(sender, what=lambda: "4e9 within the bound", number=5)
    went_on = within.held or f"{STEPS} of {STEPS} steps" in within.happened
    return Outcome(refused.held and went_on, f"{refused.happened}; {within.happened}")


main(__name__, attack_everywhere, virtual=VIRTUAL)
