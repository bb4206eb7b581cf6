"""A generation's time, as the nodes that computed it remember it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from swarmnode.measuring.trace import Timeline, parse_trace_id
from tests.net.virtual import in_virtual_time
from tests.node.conftest import Founded
from tests.node.virtual_swarm import VirtualSwarm
from tests.tiny import PROMPT

TOKENS = 60
HELD_AT = 20
HELD_S = 0.6  # a node is held back for; less than what makes a peer lost


@in_virtual_time
async def test_a_node_that_was_held_back_is_seen_in_the_slowest_token(founded: Founded, tmp_path: Path) -> None:
    async with VirtualSwarm(tmp_path) as swarm:
        founded.into(swarm)
        await swarm.bootstrap()
        for name, span in (("a", "0:3"), ("b", "3:6")):
            await swarm.node(name, span).wait_for("ready")
        async with swarm.client() as client:
            stream = await client.stream(PROMPT, max_new_tokens=TOKENS)
            async for _ in stream:
                if len(stream.result.ids) == HELD_AT:
                    held = stream.result.route[1].peer
                    swarm.world.hang(held)
                    asyncio.get_running_loop().call_later(HELD_S, swarm.world.wake, held)
            assert stream.result.reroutes == 0
            timeline = Timeline(await client.traces(parse_trace_id(stream.result.trace)))
            assert await client.traces(bytes(16)) == {}, "nobody remembers what was not"
    assert [stop.peer for stop in timeline.stops] == [hop.peer for hop in stream.result.route]
    assert [len(stop.decoded) for stop in timeline.stops] == [TOKENS - 1] * 2
    (slowest,) = timeline.slowest(1)
    assert slowest.us / 1e6 > HELD_S / 2
    assert HELD_AT <= slowest.position - len(PROMPT) < TOKENS
    late = slowest.late
    assert held in (slowest.longest.peer, *((late.source, late.target) if late else ()))
