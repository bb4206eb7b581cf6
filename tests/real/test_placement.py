"""Eight nodes of unequal speed and memory find their places, lose three of their number, and find them again."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from swarmnode.client import SwarmClient
from swarmnode.compute.memory import limit_bytes_for
from swarmnode.demo.lesson import generate_alone
from swarmnode.localswarm import LocalSwarm
from swarmnode.plan.spans.flow import bound, supply_of, throughput
from swarmnode.swarm.storage.swarmfile import load_swarm
from tests.llama import save_llama
from tests.real.conftest import PROMPT

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
SETTLE_S = 60.0
CALM_S = 15.0  # without any change: longer than a peer waits before it looks again, and its wish has to stand
TOKENS = 120
NOISE_S = 10.0  # shared machines pause for their own reasons
QUALITY = 0.5  # by the speeds that they are throttled to; on a busy machine they are slower still, and go by what they measure

Places = dict[str, tuple[int, int]]


@pytest.fixture(scope="module")
def twelve(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("twelve")
    save_llama(folder, layers=UNITS - 2)
    return folder


def places_of(client: SwarmClient) -> tuple[Places, bool]:
    """Who is where, and whether all of them serve."""
    peers = [peer for peer in client.status()["peers"] if peer["span"][1] > 0]
    return {peer["name"]: tuple(peer["span"]) for peer in peers}, all(peer["state"] == "ready" for peer in peers)


async def settled(client: SwarmClient, nodes: int) -> Places:
    """Wait until so many nodes serve and none has changed its place for a while. Fails where that takes too long."""
    deadline_s = time.monotonic() + SETTLE_S + CALM_S + NOISE_S
    while True:
        places, ready = places_of(client)
        assert time.monotonic() < deadline_s, f"not settled after {SETTLE_S:.0f} s: {places}"
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
    """Throughput of the places, by the nodes' true speeds, relative to the best that any placement could do."""
    spans = [(*span, float(NODES[name][0])) for name, span in places.items()]
    able = [(end - start, float(NODES[name][0])) for name, (start, end) in places.items()]
    return throughput(supply_of(UNITS, spans)) / bound(UNITS, able)


async def test_eight_nodes_settle_lose_three_and_settle_again(twelve: Path, tmp_path: Path) -> None:
    with LocalSwarm(tmp_path) as local:
        local.create(twelve)
        local.bootstrap()
        nodes = {
            name: local.node(name, "--throttle", str(speed), "--memory", f"{limit_bytes_for(megabytes * 1_200_000)}B")
            for name, (speed, megabytes) in NODES.items()
        }
        client = await SwarmClient.join(load_swarm(local.file), home=tmp_path / "client")
        try:
            places = await settled(client, len(NODES))
            assert {unit for start, end in places.values() for unit in range(start, end)} == set(range(UNITS))
            assert quality(places) >= QUALITY, places

            prompts = [[*PROMPT[:-1], last] for last in (11, 12, 13)]
            streams = [await client.stream(prompt, max_new_tokens=TOKENS) for prompt in prompts]
            texts = [aiter(stream) for stream in streams]
            for text in texts:
                await anext(text)  # all are under way
            for name in KILLED:
                nodes[name].kill()
            places = await settled(client, len(NODES) - len(KILLED))
            assert set(places) == set(NODES) - set(KILLED)
            assert {unit for start, end in places.values() for unit in range(start, end)} == set(range(UNITS))
            assert quality(places) >= QUALITY, places

            for prompt, stream, text in zip(prompts, streams, texts, strict=True):
                async for _ in text:
                    pass
                assert stream.result.ids == await asyncio.to_thread(generate_alone, twelve, prompt, TOKENS)
        finally:
            await client.close()
