"""A peer sends a stage 131 kB of top-k that claim to be 8.6 GB of hidden states."""

from __future__ import annotations

import asyncio
import tracemalloc

from attack import Outcome, main

from swarmnode.codec.messages import Error, Input
from swarmnode.codec.tensors import Codec, DType, TensorInfo
from tests.peer.greedy import PROMPT, Greedy
from tests.peer.toy_swarm import ToySwarm, expected

VIRTUAL, FAST = True, True
HUGE = TensorInfo(Codec.TOPK, DType.FLOAT32, (1, 1, 1 << 31), 0)
PAYLOAD_BYTES, MOST_BYTES = 131_072, 8 << 20
TIMES, TOKENS = 20, 12


async def attack() -> Outcome:
    swarm = await ToySwarm.start((0, 4))
    greedy = await Greedy(swarm).join()
    tracemalloc.start()
    for number in range(TIMES):
        channel = await greedy.open(number, 10)
        channel.send(Input(HUGE), payload=[bytes(PAYLOAD_BYTES)])
        await asyncio.sleep(0.1)
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    refused = sum(isinstance(body, Error) for body in greedy.heard)
    text = [token async for token in swarm.ring(PROMPT, TOKENS)]
    return Outcome(
        refused == TIMES and most_bytes < MOST_BYTES and text == expected(PROMPT, TOKENS),
        f"{refused} of {TIMES} refused, {most_bytes / 1e6:.1f} MB taken at most; somebody else got {len(text)} of {TOKENS} tokens",
    )


main(__name__, attack, virtual=VIRTUAL)
