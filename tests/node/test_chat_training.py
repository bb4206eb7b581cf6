"""A chat file is learnt by a swarm as by one process: answers alone, several conversations in a row, whoever feeds them."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from swarmnode.client.training.preparation import NO_DATA, prepare
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.training.lm import load_segment
from swarmnode.compute.training.local import train_locally
from swarmnode.data.samples import DataRules
from swarmnode.swarm.records.manifest import TRAIN
from swarmnode.swarm.records.run import Run
from tests.client.test_kept_tokenizer import byte_level
from tests.llama import save_llama
from tests.net.virtual import in_virtual_time
from tests.node.virtual_swarm import VirtualSwarm
from tests.training_results import assert_same_curve

STEPS = 6
TEMPLATE = "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
SETTINGS = Run(data=NO_DATA, steps=STEPS, batch=6, microbatch=2, sequence=48, learning_rate=1e-2, checkpoint_steps=2)


def save_chat_model(folder: Path) -> None:
    """A small Llama with a tokenizer of bytes and a chat template."""
    save_llama(folder, layers=2)
    tokenizer = byte_level()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


def save_chats(path: Path, count: int = 24) -> None:
    """Conversations of unequal lengths."""
    turns = [
        [{"role": "user", "content": f"{n} and {m}?"}, {"role": "assistant", "content": "no " * (n % 5) + str(n + m)}]
        for n, m in zip(range(count), range(7, 7 + count), strict=True)
    ]
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns))


@in_virtual_time
async def test_a_swarm_learns_chats_as_one_process_does(tmp_path: Path) -> None:
    model, data = tmp_path / "model", tmp_path / "chats.jsonl"
    save_chat_model(model)
    save_chats(data)
    async with VirtualSwarm(tmp_path) as swarm:
        manifest = swarm.create(model, mode=TRAIN).manifest
        assert manifest is not None
        await swarm.bootstrap()
        for number, span in enumerate(("0:2", "2:4", "2:4")):
            swarm.node(f"node-{number}", span, compress="none")
        for member in swarm.members.values():
            await member.wait_for("ready")
        first = swarm.trainer("first", data, SETTINGS)
        await first.wait_for_step(1)
        await first.kill()
        second = swarm.trainer("second", data, SETTINGS)
        await second.wait_for_step(3)
        await swarm.members["node-2"].kill()
        assert await second.finish() == STEPS
    again = prepare(manifest, model, data, SETTINGS, DataRules(epochs=2.5))[0]
    run, batches = prepare(manifest, model, data, SETTINGS)
    assert again.steps == -(-5 * batches.samples(run) // (2 * SETTINGS.batch))
    assert run.weighs_labels and len(batches.microbatch(0, 0, run).inputs) == 2, "packed"
    segment = load_segment(Checkpoint(model), 0, manifest.model.units, device=torch.device("cpu"))
    alone = {report.step: report.loss for report in train_locally(segment, run, batches)}
    assert_same_curve({**second.losses, **first.losses}, alone, steps=STEPS)
