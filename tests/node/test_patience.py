"""A client's patience holds for everything that it waits for together, and ends with a sentence."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from swarmnode.client.swarm_client import SwarmClient
from swarmnode.errors import NoRoute
from swarmnode.swarm.storage.swarmfile import load_swarm
from tests.net.virtual import in_virtual_time
from tests.node.conftest import Founded
from tests.node.virtual_swarm import VirtualSwarm
from tests.tiny import PROMPT


@in_virtual_time
async def test_a_machine_with_the_layers_that_cannot_be_reached_is_told(founded: Founded, tmp_path: Path) -> None:
    async with VirtualSwarm(tmp_path) as swarm:
        founded.into(swarm)
        await swarm.bootstrap()
        node = swarm.node("all", "0:6")
        await node.wait_for("ready")
        async with swarm.client(patience_s=3.0) as client:
            await node.kill()  # its announcement lives for some seconds more
            with pytest.raises(NoRoute, match=r"can be used: 1 machine failed, could not be reached.*the last error"):
                await client.generate(PROMPT, max_new_tokens=2)


@in_virtual_time
async def test_nobody_who_holds_the_model_is_told_in_time(founded: Founded, tmp_path: Path) -> None:
    async with VirtualSwarm(tmp_path) as swarm:
        founded.into(swarm)
        await swarm.bootstrap()
        home, loop = swarm.folder / "client", asyncio.get_running_loop()
        client = await SwarmClient.join(
            load_swarm(swarm.file), home=home, patience_s=6.0, audit_share=0.0, platform=swarm.platform()
        )
        try:
            began_s = loop.time()
            with pytest.raises(NoRoute, match="no machine has layers"):
                await client.generate(PROMPT, max_new_tokens=2)
            assert loop.time() - began_s <= 6.0 + 1.5
        finally:
            await client.close()
