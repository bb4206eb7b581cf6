"""A peer opens a session over a stage's whole cache and feeds it nothing, so that no other client has room."""

from __future__ import annotations

from attack import Outcome, main

from tests.peer.greedy import PROMPT, Greedy
from tests.peer.toy_swarm import ToySwarm, expected

VIRTUAL, FAST = True, True
CACHE_BYTES, WHOLE_CACHE = 1000, 250  # a position takes four units of one byte each
TOKENS = 12


async def attack() -> Outcome:
    swarm = await ToySwarm.start((0, 4), cache_bytes=CACHE_BYTES)
    greedy = await Greedy(swarm).join()
    await greedy.open(1, WHOLE_CACHE)
    left_positions = swarm.volunteers[0].server.free_cache_tokens
    text = [token async for token in swarm.ring(PROMPT, TOKENS)]
    return Outcome(
        left_positions == 0 and text == expected(PROMPT, TOKENS),
        f"cache for {left_positions} positions was left; somebody else got {len(text)} of {TOKENS} tokens",
    )


main(__name__, attack, virtual=VIRTUAL)
