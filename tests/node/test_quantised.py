"""A swarm on a quantised folder, which nothing is written for, says what one process says with the dequantised weights."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.packing.ggml import library
from swarmnode.errors import CheckpointError, ProtocolError
from swarmnode.founding.model_source import ModelSource, from_checkpoint
from swarmnode.ledger import Account
from swarmnode.swarm.records.manifest import QUANTISED_FORMAT, decode_manifest, encode_manifest
from tests.compute.packing.test_dequantize import quantise, save
from tests.llama import save_llama
from tests.net.virtual import in_virtual_time
from tests.node.virtual_swarm import VirtualMember, VirtualSwarm, sees_ready
from tests.tiny import TinyModel

PROMPT, NEW, UNITS = [5, 80, 3, 61, 17, 200, 9], 12, 4

pytestmark = pytest.mark.skipif(
    library() is None, reason="the package xllamacpp is not installed, or not for this machine"
)


class Quantised:
    """A quantised folder, and the same model dequantised to float32."""

    def __init__(self, folder: Path, method: str) -> None:
        save_llama(folder / "llama", layers=2)
        self.folder = folder / "quantised"
        plain = quantise(folder / "llama", self.folder, method)
        (self.folder / "tokenizer.json").unlink()  # it was made up
        described = json.loads((folder / "llama" / "config.json").read_text()) | {"dtype": "float32"}
        save(folder / "plain", {name: tensor.float().contiguous() for name, tensor in plain.items()}, described)
        self.plain = TinyModel(folder / "plain", UNITS)
        self.source: ModelSource = from_checkpoint(str(self.folder), folder / "weights", packs=True)
        assert not (folder / "weights").exists() and self.source.folder == self.folder


def weights_bytes(member: VirtualMember) -> int:
    host = member.node._host
    assert host is not None
    return host.link_config.ledger.accounts()[Account.WEIGHTS]


@pytest.mark.parametrize("method", ["gptq-4", "awq", "w4a16-ordered", "fp8", "nf4-nested", "int8"])
@in_virtual_time
async def test_two_nodes_say_what_the_plain_model_says(method: str, tmp_path: Path) -> None:
    """The nodes have only the invite; after a kill the session moves to another one."""
    quantised = Quantised(tmp_path, method)
    async with VirtualSwarm(tmp_path / "swarm") as swarm:
        invite = swarm.create(quantised.source).invite
        await swarm.bootstrap()
        spans = {"a": "0:2", "b": "2:4", "c": "2:4"}
        for name, span in spans.items():
            swarm.node(name, span, swarm=invite, dtype="float32")
        for member in swarm.members.values():
            await member.wait_for("ready")
        async with swarm.client() as client:
            await sees_ready(client, len(spans))
            prompts = [[*PROMPT, at] for at in range(3)]
            results = await asyncio.gather(*(client.generate(prompt, max_new_tokens=NEW) for prompt in prompts))
            assert [result.ids for result in results] == [quantised.plain.alone(prompt, NEW) for prompt in prompts]
            stream = await client.stream(PROMPT, max_new_tokens=NEW)
            count = 0
            async for _ in stream:
                count += 1
                if count == NEW // 2:
                    await swarm.member(stream.result.route[1].peer).kill()
            assert stream.result.ids == quantised.plain.alone(PROMPT, NEW) and stream.result.reroutes >= 1


@in_virtual_time
async def test_memory_is_the_packed_bytes(tmp_path: Path) -> None:
    quantised = Quantised(tmp_path, "w4a16-ordered")
    held = sum(entry.packed_bytes for entry in Checkpoint(quantised.folder).entries.values())
    plain = sum(entry.elements * 4 for entry in Checkpoint(quantised.folder).entries.values())
    for products, least, most in (("exact", held, 1.1 * held), ("plain", plain, 1.1 * plain)):
        async with VirtualSwarm(tmp_path / products) as swarm:
            swarm.create(quantised.source)
            await swarm.bootstrap()
            node = swarm.node("a", "0:4", dtype="float32", products=products)
            await node.wait_for("ready")
            assert least <= weights_bytes(node) < most


@in_virtual_time
async def test_an_older_machine_is_told_to_upgrade(tmp_path: Path) -> None:
    quantised = Quantised(tmp_path, "awq")
    manifest = VirtualSwarm(tmp_path / "swarm").create(quantised.source).manifest
    assert manifest is not None and manifest.format == QUANTISED_FORMAT
    raw = encode_manifest(manifest)
    assert decode_manifest(raw) == manifest
    with pytest.raises(ProtocolError, match=r"format 9.*upgrade swarmnode"):
        decode_manifest(raw.replace(b"\xa6format\x05", b"\xa6format\x09"))


@in_virtual_time
async def test_a_folder_that_changed_is_not_served(tmp_path: Path) -> None:
    quantised = Quantised(tmp_path, "gptq-4")
    async with VirtualSwarm(tmp_path / "swarm") as swarm:
        swarm.create(quantised.source)
        file = quantised.folder / "model.safetensors"
        tensors = load_file(file)
        tensors["model.layers.0.mlp.up_proj.qweight"] ^= 1
        save_file(tensors, file)
        node = swarm.node("a", "0:4")
        await swarm.bootstrap()
        with pytest.raises(CheckpointError, match="changed or damaged"):
            await node.wait_for("ready")
