"""Nodes that find their places, lose one of their number, and fill the gap. At large: tests/node/test_placement.py."""

from __future__ import annotations

from pathlib import Path

import torch

from swarmnode.client.swarm_client import SwarmClient
from swarmnode.compute.capacity.capacity import limit_bytes_for, unit_sizes
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.swarm.storage.swarmfile import load_swarm
from tests.real.forked import ForkedSwarm
from tests.tiny import PROMPT, TinyModel

NEW = 8
CACHE_TOKENS = 4096


async def until_covered(client: SwarmClient, *, without: str = "") -> None:
    """Wait until nodes that serve hold all units, and the one of this name is not among them."""
    while not client.status()["covered"] or without in {peer["name"] for peer in client.status()["peers"]}:
        await client.changed()


async def test_three_nodes_hold_all_units_also_when_one_is_killed(tiny: TinyModel, tmp_path: Path) -> None:
    sizes = unit_sizes(Checkpoint(tiny.folder), dtype=torch.float32)
    memory = f"{limit_bytes_for(sizes.need_bytes(1, 5, CACHE_TOKENS))}B"  # for four of the six units
    with ForkedSwarm(tmp_path) as local:
        local.create(tiny.folder)
        local.bootstrap()
        nodes = {name: local.node(name, "--memory", memory) for name in ("a", "b", "c")}
        for node in nodes.values():
            node.wait_for("ready")
        async with await SwarmClient.join(load_swarm(local.file), home=tmp_path / "client") as client:
            await until_covered(client)
            first = await client.generate(PROMPT, max_new_tokens=NEW)
            assert first.ids == tiny.alone(PROMPT, NEW)
            lost = next(name for name, node in nodes.items() if node.peer == first.route[0].peer)
            nodes[lost].kill()
            await until_covered(client, without=lost)
            assert (await client.generate(PROMPT, max_new_tokens=NEW)).ids == first.ids
