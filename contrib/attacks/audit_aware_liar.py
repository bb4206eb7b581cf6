"""A peer lies in single steps and computes truly several positions at once, as in an audit, to escape detection."""

from __future__ import annotations

from attack import Outcome, main
from liar import found_out
from torch import Tensor

from tests.node.audited_swarm import tamper

VIRTUAL, FAST = True, False
SIZE = 1e-4


def lie_in_single_steps(hidden_BTH: Tensor) -> Tensor:
    return hidden_BTH * (1 + SIZE) if hidden_BTH.shape[1] == 1 else hidden_BTH


async def attack() -> Outcome:
    return await found_out(lambda member, _model: tamper(member, lie_in_single_steps))


main(__name__, attack, virtual=VIRTUAL)
