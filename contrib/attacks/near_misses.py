"""A peer falsifies one position of each text by a little less than an audit counts as false."""

from __future__ import annotations

from attack import Outcome, main
from liar import found_out

from tests.node.audited_swarm import a_little_off, tamper

VIRTUAL, FAST = True, False
SESSIONS = 40  # near misses alone would need eight; passes with guesses are changed, too, and are false at once


async def attack() -> Outcome:
    return await found_out(lambda member, _model: tamper(member, a_little_off(5e-5)), within=SESSIONS)


main(__name__, attack, virtual=VIRTUAL)
