"""A last hop answers its client with 131 kB of top-k that claim to be 8.6 GB of logits."""

from __future__ import annotations

import asyncio
import tracemalloc

from attack import Outcome, main

from swarmnode.codec.messages import Mode, Want
from swarmnode.codec.tensors import Codec, DType, TensorInfo
from swarmnode.serving.client.client_session import ClientSession
from swarmnode.serving.client.session_spec import SessionSpec, ids_entry
from swarmnode.serving.job import JobResult
from tests.peer.toy_swarm import ToySwarm, expected, unpack

VIRTUAL, FAST = True, True
HUGE = TensorInfo(Codec.TOPK, DType.FLOAT32, (1, 1, 1 << 31), 0)
PAYLOAD_BYTES, MOST_BYTES = 131_072, 8 << 20
PROMPT = [5, 17, 3, 99, 42]


async def attack() -> Outcome:
    swarm = await ToySwarm.start((0, 4), (0, 4))
    liar = swarm.volunteers[0]
    liar.worker._result = lambda _job: JobResult(tensors=((HUGE, bytes(PAYLOAD_BYTES)),))  # type: ignore[method-assign]
    clock = asyncio.get_running_loop().time
    spec = SessionSpec(Mode.DRIVEN, max_length=20, width=1)
    session = ClientSession(swarm.switchboard, swarm.router, spec, swarm.config, clock=clock)
    tracemalloc.start()
    await session.start()
    session.send(ids_entry(0, [PROMPT], Want.LAST), expect=len(PROMPT))
    received = await session.receive()
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    await session.close()
    assert received.output.tensor is not None
    right = unpack(received.output.tensor, received.payload) == expected(PROMPT, 1)
    return Outcome(
        right and most_bytes < MOST_BYTES and swarm.router.suspected == [liar.peer],
        f"{most_bytes / 1e6:.1f} MB taken at most; the {'right answer came of another peer' if right else 'answer is false'}",
    )


main(__name__, attack, virtual=VIRTUAL)
