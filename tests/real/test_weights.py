"""Volunteers who hold nothing but an invite get their weights from peers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarmnode.client import SwarmClient
from swarmnode.localswarm import LocalSwarm
from swarmnode.swarm.storage.chunk_folder import used_bytes
from swarmnode.swarm.storage.swarmfile import load_swarm
from tests.real.conftest import PROMPT, TinyModel


@pytest.fixture
def founded(tiny: TinyModel, tmp_path: Path) -> Iterator[LocalSwarm]:
    model = shutil.copytree(tiny.folder, tmp_path / "model")
    with LocalSwarm(tmp_path) as local:
        local.invite = local.create(model)  # type: ignore[attr-defined]
        yield local


async def generate(local: LocalSwarm, invite: str) -> list[int]:
    async with await SwarmClient.join(load_swarm(invite), home=local.folder / "client") as client:
        return (await client.generate(PROMPT, max_new_tokens=8)).ids


async def test_an_invite_alone_is_enough_and_what_was_fetched_is_given_on(founded: LocalSwarm, tiny: TinyModel) -> None:
    invite = founded.invite  # type: ignore[attr-defined]
    door = founded.bootstrap()
    first = [founded.node("a", "--span", "0:3", swarm=invite), founded.node("b", "--span", "3:6", swarm=invite)]
    for node in first:
        node.wait_for("ready")
    assert await generate(founded, invite) == tiny.alone(PROMPT, 8)

    door.kill()  # now only the volunteers have the weights
    door.process.wait()
    shutil.rmtree(founded.folder / "model")
    addresses = first[1].wait_for("joined")["addresses"]
    late = founded.node("c", "--span", "3:6", "--peer", addresses[0], swarm=invite)
    late.wait_for("ready")
    first[1].kill()
    first[1].process.wait()
    assert await generate(founded, str(founded.file)) == tiny.alone(PROMPT, 8)


async def test_a_tampered_checkpoint_is_not_loaded(founded: LocalSwarm) -> None:
    weights = founded.folder / "model" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(data)
    founded.bootstrap()
    node = founded.node("a", "--span", "0:6")
    assert node.process.wait(60) == 1
    assert "changed or damaged" in node.tail()
    assert "Traceback" not in node.tail()


def test_only_the_span_is_fetched(founded: LocalSwarm) -> None:
    founded.bootstrap()
    node = founded.node("a", "--span", "0:1", swarm=founded.invite)  # type: ignore[attr-defined]
    node.wait_for("ready")
    whole = (founded.folder / "model" / "model.safetensors").stat().st_size
    assert 0 < used_bytes(node.home / "weights") <= max(whole, 2 * 1024 * 1024)
