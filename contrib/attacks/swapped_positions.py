"""A peer swaps two positions of each prompt, and computes truly otherwise."""

from __future__ import annotations

from attack import Outcome, main
from liar import found_out

from tests.node.audited_swarm import swapped, tamper

VIRTUAL, FAST = True, False


async def attack() -> Outcome:
    return await found_out(lambda member, _model: tamper(member, swapped))


main(__name__, attack, virtual=VIRTUAL)
