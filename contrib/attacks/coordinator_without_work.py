"""A volunteer leads a training, says so each second, and gives out no work, so that nothing is learnt."""

from __future__ import annotations

from attack import Outcome, main
from training_liar import train_against

from tests.training.sabotage import Ill
from tests.training.test_hangs import Withholds

VIRTUAL, FAST = True, False


async def attack() -> Outcome:
    idle = Withholds(Ill.PINGS, 1)
    return await train_against(idle, what=lambda: f"no lease in {idle.count} frames", number=0)


main(__name__, attack, virtual=VIRTUAL)
