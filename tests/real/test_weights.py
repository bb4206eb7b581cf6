"""Volunteers who hold nothing but an invite get their weights from peers, over libp2p, or from their own disk. More of it:
tests/node/test_weights.py, tests/weights/test_local_files.py."""

from __future__ import annotations

import shutil
from pathlib import Path

from swarmnode.client.swarm_client import SwarmClient
from swarmnode.localswarm import LocalSwarm
from swarmnode.swarm.storage.swarmfile import load_swarm
from tests.compute.model.llama_gguf import save_llama_gguf
from tests.tiny import PROMPT, TinyModel

NEW = 8


async def generate(local: LocalSwarm, invite: str) -> list[int]:
    async with await SwarmClient.join(load_swarm(invite), home=local.folder / "client") as client:
        return (await client.generate(PROMPT, max_new_tokens=NEW)).ids


async def test_an_invite_alone_is_enough_and_what_was_fetched_is_given_on(tiny: TinyModel, tmp_path: Path) -> None:
    model = shutil.copytree(tiny.folder, tmp_path / "model")
    with LocalSwarm(tmp_path) as local:
        invite = local.create(model)
        door = local.bootstrap()
        first = [local.node("a", "--span", "0:3", swarm=invite), local.node("b", "--span", "3:6", swarm=invite)]
        for node in first:
            node.wait_for("ready")
        assert await generate(local, invite) == tiny.alone(PROMPT, NEW)

        door.kill()  # now only the volunteers have the weights
        door.process.wait()
        shutil.rmtree(model)
        addresses = first[1].wait_for("joined")["addresses"]
        late = local.node("c", "--span", "3:6", "--peer", addresses[0], swarm=invite)
        late.wait_for("ready")
        first[1].kill()
        first[1].process.wait()
        assert await generate(local, str(local.file)) == tiny.alone(PROMPT, NEW)


def test_a_volunteers_own_file_is_enough(tmp_path: Path) -> None:
    """The founder's GGUF file is gone, and a volunteer has the same one under another name."""
    founders, own = tmp_path / "founders.gguf", tmp_path / "models/publisher/downloaded-Q8_0.gguf"
    save_llama_gguf(founders)
    with LocalSwarm(tmp_path) as local:
        invite = local.create(founders)
        own.parent.mkdir(parents=True)
        shutil.move(founders, own)
        local.bootstrap()
        node = local.node("a", "--weights", str(tmp_path / "models"), swarm=invite)
        assert node.wait_for("copied")["copied_bytes"] == own.stat().st_size
        node.wait_for("ready")
