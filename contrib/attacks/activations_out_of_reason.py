"""A volunteer in the middle of a model sends 3e38 as activations, so that honest stages behind it meet infinity."""

from __future__ import annotations

from attack import Outcome, main
from training_liar import train_against

from swarmnode.codec.frames import FrameKind
from tests.training.test_not_finite import LIAR, Sender

VIRTUAL, FAST = True, True


async def attack() -> Outcome:
    sender = Sender(FrameKind.FORWARD, 3e38)
    return await train_against(sender, what=lambda: f"{sender.lies} frames of it", number=LIAR)


main(__name__, attack, virtual=VIRTUAL)
