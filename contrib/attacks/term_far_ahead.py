"""A volunteer of a training claims to follow a coordinator of the largest possible term, so that no peer can lead."""

from __future__ import annotations

from attack import Outcome, main
from training_liar import train_against

from swarmnode.codec.training_messages import MAX_TERM
from tests.training.test_liars import Liar, term

VIRTUAL, FAST = True, True


async def attack() -> Outcome:
    liar = Liar(term(MAX_TERM))
    return await train_against(liar, what=lambda: f"{liar.lies} times the term {MAX_TERM:,}")


main(__name__, attack, virtual=VIRTUAL)
