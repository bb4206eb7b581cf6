"""Capacity, abandoned sessions, latecomers, and models that go wrong."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from swarmnode.client import SwarmClient
from swarmnode.compute.memory import limit_bytes_for, unit_sizes
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.errors import Busy, PeerRefused
from swarmnode.localswarm import LocalSwarm
from swarmnode.swarm.storage.swarmfile import load_swarm
from tests.real.conftest import PROMPT, TinyModel

CACHE_TOKENS = 4096


@pytest.fixture(scope="module")
def founded(tiny: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A .swarm file; each test has a swarm of its own by it."""
    local = LocalSwarm(tmp_path_factory.mktemp("founded"))
    local.create(tiny.folder)
    return local.file


@pytest.fixture
def local(founded: Path, tmp_path: Path) -> Iterator[LocalSwarm]:
    with LocalSwarm(tmp_path) as local:
        shutil.copy2(founded, local.file)
        yield local


def memory_for(tiny: TinyModel, start: int = 0, end: int = 6) -> str:
    """Memory for these units and CACHE_TOKENS positions."""
    sizes = unit_sizes(Checkpoint(tiny.folder), dtype=torch.float32)
    return f"{limit_bytes_for(sizes.need_bytes(start, end, CACHE_TOKENS))}B"


async def joined(local: LocalSwarm, patience_s: float = 30.0) -> SwarmClient:
    client = await SwarmClient.join(load_swarm(local.file), home=local.folder / "client", patience_s=patience_s)
    while not client.status()["covered"]:
        await client.changed()
    return client


async def sessions(client: SwarmClient) -> int:
    return sum(peer["sessions"] for peer in client.status()["peers"])


async def test_a_full_node_says_busy_and_takes_the_next_one_when_it_can(local: LocalSwarm, tiny: TinyModel) -> None:
    local.bootstrap()
    local.node("a", "--memory", memory_for(tiny)).wait_for("ready")
    async with await joined(local, patience_s=1.0) as client:
        first = await client.stream(PROMPT, max_new_tokens=2500)
        tokens = first.__aiter__()
        await anext(tokens)
        with pytest.raises(Busy) as refused:
            await client.generate(PROMPT, max_new_tokens=2500)
        assert refused.value.retry_s > 0
        with pytest.raises(PeerRefused, match="TOO_LARGE"):
            await client.generate(PROMPT, max_new_tokens=100_000)
        assert (await client.generate(PROMPT, max_new_tokens=8)).ids == tiny.alone(PROMPT, 8), "a short one still fits"
        await tokens.aclose()
        again = await client.stream(PROMPT, max_new_tokens=2500)
        await anext(again.__aiter__())


async def test_the_sessions_of_a_dead_client_are_freed(local: LocalSwarm, tiny: TinyModel) -> None:
    local.bootstrap()
    local.node("a").wait_for("ready")
    ids = ",".join(map(str, PROMPT))
    command = [sys.executable, "-m", "swarmnode.cli.main", "generate", str(local.file), "--ids", ids, "-n", "3000"]
    async with await joined(local) as client:
        dying = await asyncio.create_subprocess_exec(*command, env=local.environment, stdout=subprocess.PIPE)
        assert dying.stdout is not None
        await dying.stdout.readexactly(4)  # it has tokens: its session is open
        while await sessions(client) == 0:
            await client.changed()
        dying.send_signal(signal.SIGKILL)
        await dying.wait()

        async def freed() -> None:
            while await sessions(client):
                await client.changed()

        await asyncio.wait_for(freed(), 40)


async def test_a_node_waits_for_a_swarm_that_is_not_there_yet(local: LocalSwarm, tiny: TinyModel) -> None:
    node = local.node("early")
    node.wait_for("waiting")
    local.bootstrap()
    node.wait_for("ready")
    async with await joined(local) as client:
        assert (await client.generate(PROMPT, max_new_tokens=4)).ids == tiny.alone(PROMPT, 4)


async def test_units_that_lost_their_only_holder_get_another(local: LocalSwarm, tiny: TinyModel) -> None:
    local.bootstrap()
    fixed = local.node("fixed", "--span", "0:3")
    fixed.wait_for("ready")
    free = local.node("free", "--memory", memory_for(tiny, 1, 5))
    taken = free.wait_for("ready")["span"]
    assert taken[1] == 6
    async with await joined(local) as client:
        assert (await client.generate(PROMPT, max_new_tokens=4)).ids == tiny.alone(PROMPT, 4)


async def test_a_model_that_yields_nan_is_reported_not_spoken(tiny: TinyModel, tmp_path: Path) -> None:
    model = tmp_path / "nan"
    model.mkdir()
    (model / "config.json").write_bytes((tiny.folder / "config.json").read_bytes())
    tensors = load_file(tiny.folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = float("nan")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with LocalSwarm(tmp_path) as local:
        local.create(model)
        local.bootstrap()
        for name, span in (("a", "0:3"), ("b", "3:6")):
            local.node(name, "--span", span).wait_for("ready")
        async with await joined(local) as client:
            with pytest.raises(PeerRefused, match="NaN"):
                await client.generate(PROMPT, max_new_tokens=4)
            assert json.dumps(client.status())
