"""A peer sends zeros for the last two positions of each prompt, so that the peer behind it is blamed."""

from __future__ import annotations

from attack import Outcome, main
from liar import found_out

from tests.node.audited_swarm import tamper, zeroed

VIRTUAL, FAST = True, False


async def attack() -> Outcome:
    return await found_out(lambda member, _model: tamper(member, zeroed(-1, -2)))


main(__name__, attack, virtual=VIRTUAL)
