"""A peer opens sessions at a stage of the embedding alone, which has no cache to reserve, and fills its journals."""

from __future__ import annotations

from attack import Outcome, main

from tests.peer.greedy import PROMPT, Greedy
from tests.peer.toy_swarm import ToySwarm, expected

VIRTUAL, FAST = True, True
LIMIT_BYTES = 600_000  # links use a part of it
SESSIONS, POSITIONS, TOKENS = 60, 20, 12


async def attack() -> Outcome:
    swarm = await ToySwarm.start((0, 1), (1, 4))
    ledger = swarm.volunteers[0].ledger
    ledger.limit_bytes = LIMIT_BYTES
    greedy = await Greedy(swarm).join()
    for number in range(SESSIONS):
        await greedy.open(number, POSITIONS)
    most_bytes = ledger.used_bytes
    text = [token async for token in swarm.ring(PROMPT, TOKENS)]
    return Outcome(
        most_bytes <= LIMIT_BYTES and greedy.refusals > 0 and text == expected(PROMPT, TOKENS),
        f"{greedy.refusals} of {SESSIONS} sessions refused, {most_bytes} of {LIMIT_BYTES} bytes taken; somebody else got "
        f"{len(text)} of {TOKENS} tokens",
    )


main(__name__, attack, virtual=VIRTUAL)
