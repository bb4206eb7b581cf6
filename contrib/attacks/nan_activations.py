"""A volunteer in the middle of a model sends NaN as activations, so that the honest stage behind it ends the run."""

from __future__ import annotations

from attack import Outcome, main
from training_liar import train_against

from swarmnode.codec.frames import FrameKind
from tests.training.test_not_finite import LIAR, Sender

VIRTUAL, FAST = True, True


async def attack() -> Outcome:
    sender = Sender(FrameKind.FORWARD)
    return await train_against(sender, what=lambda: f"{sender.lies} frames of it", number=LIAR)


main(__name__, attack, virtual=VIRTUAL)
