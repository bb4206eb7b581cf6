"""Eight nodes of unequal speed and memory find their places, lose three of their number, and find them again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from swarmnode.client.swarm_client import SwarmClient
from swarmnode.compute.capacity.capacity import limit_bytes_for
from swarmnode.plan.spans.flow import bound, supply_of, throughput
from tests.net.virtual import in_virtual_time
from tests.node.conftest import Founded
from tests.node.virtual_swarm import VirtualSwarm
from tests.tiny import PROMPT, TinyModel

UNITS = 12
NODES = {  # units/s and MB beside the buffers: about a unit each
    "fast": (400, 6),
    "quick": (300, 5),
    "steady": (200, 4),
    "large": (200, 8),
    "middle": (150, 6),
    "small": (100, 5),
    "little": (100, 4),
    "slow": (60, 8),
}
KILLED = ("quick", "large", "little")
SETTLED_S = 60.0
CALM_S = 15.0  # without any change: longer than a peer waits before it looks again, and its wish has to stand
TOKENS = 40
QUALITY = 0.95
QUALITY_AFTER_LOSSES = 0.75  # of a few nodes that are left where they serve, by the luck of who looks first: 0.79 to 1

Places = dict[str, tuple[int, int]]


@pytest.fixture(scope="module")
def twelve(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel.save(tmp_path_factory.mktemp("twelve"), layers=UNITS - 2)


@pytest.fixture(scope="module")
def founded(twelve: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Founded:
    return Founded.on(twelve.folder, tmp_path_factory.mktemp("founded"))


def places_of(client: SwarmClient) -> tuple[Places, bool]:
    """Who is where, and whether all of them serve."""
    peers = [peer for peer in client.status()["peers"] if peer["span"][1] > 0]
    return {peer["name"]: tuple(peer["span"]) for peer in peers}, all(peer["state"] == "ready" for peer in peers)


async def settled(client: SwarmClient, nodes: int) -> Places:
    """Wait until so many nodes serve and none has changed its place for a while. Fails where that takes too long."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + SETTLED_S + CALM_S
    while True:
        places, ready = places_of(client)
        assert loop.time() < deadline_s, f"not settled after {SETTLED_S:.0f} s: {places}"
        try:
            await asyncio.wait_for(until_changed(client, places, ready), CALM_S)
        except asyncio.TimeoutError:
            if ready and len(places) == nodes:
                return places


async def until_changed(client: SwarmClient, places: Places, ready: bool) -> None:
    """Wait until somebody is elsewhere or in another state."""
    while places_of(client) == (places, ready):
        await client.changed()


def quality(places: Places) -> float:
    """Throughput of the places, by the nodes' speeds, relative to the best that any placement could do."""
    spans = [(*span, float(NODES[name][0])) for name, span in places.items()]
    able = [(end - start, float(NODES[name][0])) for name, (start, end) in places.items()]
    return throughput(supply_of(UNITS, spans)) / bound(UNITS, able)


def assert_good(places: Places, least: float) -> None:
    """All units are held, nearly as well as they could be."""
    assert {unit for start, end in places.values() for unit in range(start, end)} == set(range(UNITS))
    assert quality(places) >= least, places


@in_virtual_time
async def test_eight_nodes_settle_lose_three_and_settle_again(
    founded: Founded, twelve: TinyModel, tmp_path: Path
) -> None:
    async with VirtualSwarm(tmp_path) as swarm:
        founded.into(swarm)
        await swarm.bootstrap()
        for name, (speed, megabytes) in NODES.items():
            swarm.node(name, throttle_units_per_s=speed, memory_bytes=limit_bytes_for(megabytes * 1_200_000))
        async with swarm.client() as client:
            assert_good(await settled(client, len(NODES)), QUALITY)
            prompts = [[*PROMPT[:-1], last] for last in (11, 12, 13)]
            streams = [await client.stream(prompt, max_new_tokens=TOKENS) for prompt in prompts]
            texts = [aiter(stream) for stream in streams]
            for text in texts:
                await anext(text)  # all are under way
            for name in KILLED:
                await swarm.members[name].kill()
            places = await settled(client, len(NODES) - len(KILLED))
            assert set(places) == set(NODES) - set(KILLED)
            assert_good(places, QUALITY_AFTER_LOSSES)
            for prompt, stream, text in zip(prompts, streams, texts, strict=True):
                async for _ in text:
                    pass
                assert stream.result.ids == twelve.alone(prompt, TOKENS)
