"""A volunteer puts one finite, huge number into activations or gradients, so that it overflows in an honest stage."""

from __future__ import annotations

from attack import Outcome, main
from training_liar import train_against

from tests.training.test_not_finite import PLACES, OneNumber

VIRTUAL, FAST = True, False


async def attack() -> Outcome:
    outcomes = []
    for number, kind in PLACES:
        sender = OneNumber(kind, 3e38)
        outcomes.append(
            await train_against(sender, what=lambda sent=sender, kind=kind: f"{sent.lies} {kind.name}", number=number)
        )
    return Outcome(all(outcome.held for outcome in outcomes), "; ".join(outcome.happened for outcome in outcomes))


main(__name__, attack, virtual=VIRTUAL)
