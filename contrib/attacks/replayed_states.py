"""A peer computes nothing and sends the states of an earlier step instead."""

from __future__ import annotations

from attack import Outcome, main
from liar import found_out
from torch import Tensor

from tests.node.audited_swarm import Change, tamper

VIRTUAL, FAST = True, False


def replay() -> Change:
    last: Tensor | None = None

    def change(hidden_BTH: Tensor) -> Tensor:
        nonlocal last
        before, last = last, hidden_BTH
        return hidden_BTH if before is None or before.shape != hidden_BTH.shape else before

    return change


async def attack() -> Outcome:
    return await found_out(lambda member, _model: tamper(member, replay()))


main(__name__, attack, virtual=VIRTUAL)
