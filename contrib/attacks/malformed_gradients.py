"""A volunteer sends payloads of half the size, so that the honest stage that decodes them is blamed."""

from __future__ import annotations

from attack import Outcome, main
from training_liar import train_against

from tests.training.test_not_finite import PLACES, OtherSize

VIRTUAL, FAST = True, False


async def attack() -> Outcome:
    outcomes = []
    for number, kind in PLACES:
        sender = OtherSize(kind, factor=0.5)
        outcomes.append(
            await train_against(sender, what=lambda sent=sender, kind=kind: f"{sent.lies} {kind.name}", number=number)
        )
    return Outcome(all(outcome.held for outcome in outcomes), "; ".join(outcome.happened for outcome in outcomes))


main(__name__, attack, virtual=VIRTUAL)
