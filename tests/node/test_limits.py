"""Capacity, abandoned sessions, latecomers, and models that go wrong."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from swarmnode.client.swarm_client import SwarmClient
from swarmnode.compute.capacity.capacity import limit_bytes_for, unit_sizes
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.errors import Busy, LocalError, PeerRefused, UsageError
from tests.net.virtual import in_virtual_time
from tests.node.conftest import Founded
from tests.node.virtual_swarm import VirtualSwarm
from tests.tiny import PROMPT, TinyModel

CACHE_TOKENS = 4096
FREED_S = 40.0
SLOW_PASS_S = 0.1  # so that few tokens are computed for nobody


@contextlib.asynccontextmanager
async def swarm_with_a_door(founded: Founded, folder: Path) -> AsyncIterator[VirtualSwarm]:
    async with VirtualSwarm(folder) as swarm:
        founded.into(swarm)
        await swarm.bootstrap()
        yield swarm


def memory_for(tiny: TinyModel, start: int = 0, end: int = 6) -> int:
    """Bytes for these units and CACHE_TOKENS positions."""
    sizes = unit_sizes(Checkpoint(tiny.folder), dtype=torch.float32)
    return limit_bytes_for(sizes.need_bytes(start, end, CACHE_TOKENS))


async def until_sessions(client: SwarmClient, number: int) -> None:
    """Wait until the nodes announce so many sessions."""
    while sum(peer["sessions"] for peer in client.status()["peers"]) != number:
        await client.changed()


@in_virtual_time
async def test_a_full_node_says_busy_and_takes_the_next_one_when_it_can(
    founded: Founded, tiny: TinyModel, tmp_path: Path
) -> None:
    async with swarm_with_a_door(founded, tmp_path) as swarm:
        node = swarm.node("a", cost_s=lambda _item: SLOW_PASS_S, memory_bytes=memory_for(tiny))
        await node.wait_for("ready")
        async with swarm.client(patience_s=1.0) as client:
            first = await client.stream(PROMPT, max_new_tokens=2500)
            tokens = aiter(first)
            await anext(tokens)
            with pytest.raises(Busy) as refused:
                await client.generate(PROMPT, max_new_tokens=2500)
            assert refused.value.retry_s > 0
            with pytest.raises(PeerRefused, match="TOO_LARGE"):
                await client.generate(PROMPT, max_new_tokens=100_000)
            short = await client.generate(PROMPT, max_new_tokens=8)
            assert short.ids == tiny.alone(PROMPT, 8), "a short one still fits"
            await tokens.aclose()
            again = await client.stream(PROMPT, max_new_tokens=2500)
            await anext(aiter(again))


@in_virtual_time
async def test_the_sessions_of_a_dead_client_are_freed(founded: Founded, tmp_path: Path) -> None:
    async with swarm_with_a_door(founded, tmp_path) as swarm:
        await swarm.node("a", cost_s=lambda _item: SLOW_PASS_S).wait_for("ready")
        async with swarm.client() as watching, swarm.client() as dying:
            text = aiter(await dying.stream(PROMPT, max_new_tokens=4000))
            await anext(text)
            await until_sessions(watching, 1)
            swarm.world.kill(dying.peer_id)
            await asyncio.wait_for(until_sessions(watching, 0), FREED_S)


@in_virtual_time
async def test_a_node_waits_for_a_swarm_that_is_not_there_yet(
    founded: Founded, tiny: TinyModel, tmp_path: Path
) -> None:
    async with VirtualSwarm(tmp_path) as swarm:
        founded.into(swarm)
        node = swarm.node("early")
        await node.wait_for("waiting")
        await swarm.bootstrap()
        await node.wait_for("ready")
        async with swarm.client() as client:
            assert (await client.generate(PROMPT, max_new_tokens=4)).ids == tiny.alone(PROMPT, 4)


@in_virtual_time
async def test_who_has_room_takes_the_units_that_nobody_holds(
    founded: Founded, tiny: TinyModel, tmp_path: Path
) -> None:
    async with swarm_with_a_door(founded, tmp_path) as swarm:
        await swarm.node("fixed", "0:3").wait_for("ready")
        taken = (await swarm.node("free", memory_bytes=memory_for(tiny, 1, 5)).wait_for("ready"))["span"]
        assert taken[1] == 6
        async with swarm.client() as client:
            assert (await client.generate(PROMPT, max_new_tokens=4)).ids == tiny.alone(PROMPT, 4)


@in_virtual_time
async def test_a_model_that_yields_nan_is_reported_not_spoken(tiny: TinyModel, tmp_path: Path) -> None:
    model = tmp_path / "nan"
    model.mkdir()
    (model / "config.json").write_bytes((tiny.folder / "config.json").read_bytes())
    tensors = load_file(tiny.folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = float("nan")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    async with VirtualSwarm(tmp_path) as swarm:
        swarm.create(model)
        await swarm.bootstrap()
        for name, span in (("a", "0:3"), ("b", "3:6")):
            await swarm.node(name, span).wait_for("ready")
        async with swarm.client() as client:
            with pytest.raises(PeerRefused, match="NaN"):
                await client.generate(PROMPT, max_new_tokens=4)
            assert json.dumps(client.status())


@pytest.mark.parametrize(
    ("span", "stage", "error", "words"),
    [
        ("3:9", {}, UsageError, "layers 0 to 5"),
        (None, {"memory_bytes": 1_000_000}, LocalError, "not enough"),
        (None, {"device": "cuda:7"}, LocalError, "no device"),
        (None, {"dtype": "float8"}, UsageError, "--dtype"),
        (None, {"quantize": "int2"}, UsageError, "--quantize"),
    ],
)
@in_virtual_time
async def test_what_this_machine_or_model_cannot(
    founded: Founded, tmp_path: Path, span: str | None, stage: dict[str, Any], error: type[Exception], words: str
) -> None:
    async with swarm_with_a_door(founded, tmp_path) as swarm:
        with pytest.raises(error, match=words):
            await swarm.node("a", span, **stage).task
