"""Nodes train a model with a bottleneck as one process does, evaluate and serve it, and nobody exports it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swarmnode.client.training.preparation import check_exports, prepare
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.training.lm import load_segment
from swarmnode.compute.training.local import train_locally
from swarmnode.errors import UsageError
from swarmnode.founding.model_source import with_bottleneck
from swarmnode.founding.swarm_creation import Bootstraps, create_swarm
from swarmnode.swarm.records.manifest import TRAIN, decode_manifest, encode_manifest
from tests.net.virtual import in_virtual_time
from tests.node.test_chat_training import save_chat_model, save_chats
from tests.node.test_evaluation import RULES, RUN, STEPS
from tests.node.virtual_swarm import VirtualSwarm

PROMPT = (1, 2, 3, 200, 7)


async def check_node_swarm(tmp_path: Path, anchor: int) -> None:
    """Train, evaluate and serve a model with a bottleneck, with anchors of so many numbers (0: none), and compare all with one
    process."""
    model, data = tmp_path / "model", tmp_path / "chats.jsonl"
    save_chat_model(model)
    save_chats(data, 40)
    sample = [number * 7 % 256 for number in range(500)]
    source = with_bottleneck(str(model), tmp_path / "thin", 8, lambda _: sample, stage_layers=1, anchor=anchor)
    assert not any("quantised" in remark for remark in source.remarks), "its weights are plain"
    async with VirtualSwarm(tmp_path) as swarm:
        manifest = swarm.create(source, mode=TRAIN).manifest
        assert manifest is not None and decode_manifest(encode_manifest(manifest)) == manifest
        assert (manifest.bottleneck, manifest.anchor or 0) == (8, anchor)
        units = manifest.model.units
        await swarm.bootstrap()
        for number, span in enumerate((f"0:{units - 1}", f"{units - 1}:{units}", f"{units - 1}:{units}")):
            swarm.node(f"node-{number}", span, compress="none")
        for member in swarm.members.values():
            await member.wait_for("ready")
        trainer = swarm.trainer("first", data, RUN, RULES)
        await trainer.wait_for_step(2)
        await swarm.members["node-2"].kill()
        assert await trainer.finish() == STEPS
        async with swarm.client() as client:
            generated = await client.generate(PROMPT, max_new_tokens=4, temperature=0.0)
            with pytest.raises(UsageError, match="hold_ends does not work"):
                await client.acausal_lm(hold_ends=True)
            if anchor:
                with pytest.raises(UsageError, match="does not compress as int8: choose auto, none, bf16, fp16"):
                    await client.generate(PROMPT, max_new_tokens=1, compress="int8")
    run, batches = prepare(manifest, source.folder, data, RUN, RULES)
    segment = load_segment(Checkpoint(source.folder), 0, units, device=torch.device("cpu"))
    alone = list(train_locally(segment, run, batches))
    told = list(PROMPT)
    assert [trainer.losses[step] for step in range(STEPS)] == pytest.approx([one.loss for one in alone], rel=1e-5)
    with torch.no_grad():  # the parameters of the last step, in one process
        for _ in range(4):
            logits_BTV = segment.span.forward(torch.tensor([told]), cache=None)
            told.append(int(logits_BTV[0, -1].argmax()))
    assert list(generated.ids) == told[len(PROMPT) :]
    held_out = {one.step: one.held_out_loss for one in alone if one.held_out_loss is not None}
    assert trainer.held_out == pytest.approx(held_out, rel=1e-5)
    with pytest.raises(UsageError, match="no class of transformers"):
        check_exports(manifest)


@in_virtual_time
async def test_nodes_train_evaluate_and_serve_a_model_with_a_bottleneck(tmp_path: Path) -> None:
    await check_node_swarm(tmp_path, anchor=8)


@in_virtual_time
async def test_nodes_train_evaluate_and_serve_a_model_without_anchors(tmp_path: Path) -> None:
    await check_node_swarm(tmp_path, anchor=0)


def test_a_served_swarm_has_no_bottleneck(tmp_path: Path) -> None:
    save_chat_model(tmp_path / "model")
    source = with_bottleneck(str(tmp_path / "model"), tmp_path / "thin", 8, lambda _: [1] * 500, stage_layers=1)
    with pytest.raises(UsageError, match="it is served by the swarm that trains it"):
        create_swarm("thin", source, Bootstraps())
