"""Volunteers who hold nothing but an invite get their weights from peers."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from swarmnode.errors import SwarmnodeError
from swarmnode.node.bootstrap import Bootstrap
from swarmnode.swarm.storage.chunk_folder import used_bytes
from tests.net.virtual import in_virtual_time
from tests.node.virtual_swarm import VirtualSwarm
from tests.tiny import PROMPT, TinyModel

NEW = 8


@dataclass
class Town:
    """A swarm on a checkpoint of its own, which tests may damage; only the door has it."""

    swarm: VirtualSwarm
    door: Bootstrap
    model: Path
    invite: str

    async def generate(self) -> list[int]:
        async with self.swarm.client(self.invite) as client:
            return (await client.generate(PROMPT, max_new_tokens=NEW)).ids


@contextlib.asynccontextmanager
async def town_of(tiny: TinyModel, folder: Path) -> AsyncIterator[Town]:
    model = shutil.copytree(tiny.folder, folder / "model")
    async with VirtualSwarm(folder) as swarm:
        invite = swarm.create(model).invite
        yield Town(swarm, await swarm.bootstrap(), model, invite)


@in_virtual_time
async def test_an_invite_alone_is_enough_and_what_was_fetched_is_given_on(tiny: TinyModel, tmp_path: Path) -> None:
    async with town_of(tiny, tmp_path) as town:
        swarm, invite = town.swarm, town.invite
        first = [swarm.node("a", "0:3", swarm=invite), swarm.node("b", "3:6", swarm=invite)]
        for node in first:
            await node.wait_for("ready")
        assert await town.generate() == tiny.alone(PROMPT, NEW)

        shutil.rmtree(town.model)  # now only the volunteers have the weights
        late = swarm.node("c", "3:6", swarm=invite)
        await late.wait_for("ready")
        await first[1].kill()
        assert await town.generate() == tiny.alone(PROMPT, NEW)


@in_virtual_time
async def test_a_tampered_checkpoint_is_not_loaded(tiny: TinyModel, tmp_path: Path) -> None:
    async with town_of(tiny, tmp_path) as town:
        weights = town.model / "model.safetensors"
        data = bytearray(weights.read_bytes())
        data[-5] ^= 1
        weights.write_bytes(data)
        with pytest.raises(SwarmnodeError, match="changed or damaged"):
            await town.swarm.node("a", "0:6").task


@in_virtual_time
async def test_only_the_span_is_fetched(tiny: TinyModel, tmp_path: Path) -> None:
    async with town_of(tiny, tmp_path) as town:
        node = town.swarm.node("a", "0:1", swarm=town.invite)
        await node.wait_for("ready")
        whole = (town.model / "model.safetensors").stat().st_size
        assert 0 < used_bytes(node.home / "weights") <= max(whole, 2 * 1024 * 1024)
