"""A swarm evaluates on held-out data by the parameters of the step, whoever dies meanwhile, and learns as without it."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from swarmnode.client.training.preparation import prepare
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.training.lm import load_segment
from swarmnode.compute.training.local import train_locally
from swarmnode.data.samples import DataRules
from swarmnode.errors import ProtocolError, UsageError
from swarmnode.swarm.records.manifest import TRAIN
from swarmnode.swarm.records.run import RECIPE, Recipe, Run, decode_run
from swarmnode.training.coordinator import coordinator
from swarmnode.training.worker import training_stage
from tests.compute.training.test_packing import EXPERTS, SIZES
from tests.net.virtual import in_virtual_time
from tests.node.test_chat_training import SETTINGS, save_chat_model, save_chats
from tests.node.virtual_swarm import VirtualSwarm

STEPS = SETTINGS.steps
RULES = DataRules(held_out_share=0.3, evaluate_every=2)
RUN = msgspec.structs.replace(SETTINGS, schedule=RECIPE, recipe=Recipe("hf-cosine"))
OF_MIXTURES = Recipe("hf-cosine", router_balance=0.1, router_z_loss=0.01, ema=0.5, balance_by_layer=True)


def save_mixture(folder: Path) -> None:
    """A small Qwen3-MoE with the chat model's tokenizer."""
    save_chat_model(folder)
    config = AutoConfig.for_model("qwen3_moe", **{**SIZES, **EXPERTS, "vocab_size": 512})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


@in_virtual_time
async def test_a_swarm_evaluates_as_one_process_does(tmp_path: Path) -> None:
    """The model is a mixture, whose routers are balanced over all stages, and evaluates by the average of its weights."""
    model, data = tmp_path / "model", tmp_path / "chats.jsonl"
    save_mixture(model)
    settings = msgspec.structs.replace(RUN, recipe=OF_MIXTURES)
    save_chats(data, 40)
    async with VirtualSwarm(tmp_path) as swarm:
        manifest = swarm.create(model, mode=TRAIN).manifest
        assert manifest is not None
        await swarm.bootstrap()
        for number, span in enumerate(("0:2", "2:4", "2:4")):
            swarm.node(f"node-{number}", span, compress="none")
        for member in swarm.members.values():
            await member.wait_for("ready")
        trainer = swarm.trainer("first", data, settings, RULES)
        await trainer.wait_for_step(2)
        await swarm.members["node-2"].kill()
        assert await trainer.finish() == STEPS
        again = swarm.trainer("again", data, settings, RULES)
        assert await again.finish() == STEPS
        assert again.losses == trainer.losses and again.fed == 0, "the run is over: the swarm tells of it once more"
    run, batches = prepare(manifest, model, data, settings, RULES)
    segment = load_segment(Checkpoint(model), 0, manifest.model.units, device=torch.device("cpu"))
    alone = list(train_locally(segment, run, batches))
    assert [trainer.losses[step] for step in range(STEPS)] == pytest.approx([one.loss for one in alone], rel=1e-3)
    held_out = {one.step: one.held_out_loss for one in alone if one.held_out_loss is not None}
    assert sorted(held_out) == [0, 2, 4, 5]
    assert trainer.held_out == pytest.approx(held_out, rel=1e-3)
    assert [trainer.expert_loads[step] for step in range(STEPS)] == pytest.approx(
        [one.expert_load for one in alone], rel=0.05
    )


async def test_held_out_data_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model, data = tmp_path / "model", tmp_path / "chats.jsonl"
    save_chat_model(model)
    save_chats(data, 40)
    swarm = VirtualSwarm(tmp_path)
    manifest: Any = swarm.create(model, mode=TRAIN).manifest
    text = tmp_path / "a.txt"
    text.write_text("words " * 400)
    for rules, told in (
        (DataRules(held_out=text, evaluate_every=2), "of another kind"),
        (DataRules(held_out_share=1e-9, evaluate_every=2), "fewer than a microbatch"),
    ):
        with pytest.raises(UsageError, match=told):
            prepare(manifest, model, data, RUN, rules)
    run, batches = prepare(manifest, model, text, RUN, RULES)
    assert run.evaluations_at(0) and batches.microbatch(0, run.microbatches, run).inputs[0].shape == (2, 48)


@pytest.mark.parametrize(
    ("module", "told"),
    [
        (coordinator, "if its version is older, update swarmnode there"),
        (training_stage, "(layers 0-3), which cannot take up the run: if its version is older, update swarmnode there"),
    ],
    ids=["as coordinator", "as worker"],
)
@in_virtual_time
async def test_a_node_of_an_earlier_version_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, told: str
) -> None:
    def decode_as_before(raw: bytes) -> Run:
        run = decode_run(raw)
        if run.has_recipe:
            raise ProtocolError("bad run: the training needs a schedule out of constant, linear, cosine")
        return run

    monkeypatch.setattr(module, "decode_run", decode_as_before)
    model, data = tmp_path / "model", tmp_path / "chats.jsonl"
    save_chat_model(model)
    save_chats(data)
    async with VirtualSwarm(tmp_path) as swarm:
        swarm.create(model, mode=TRAIN)
        await swarm.bootstrap()
        await swarm.node("old", "0:4").wait_for("ready")
        trainer = swarm.trainer("new", data, RUN)
        await trainer.wait_until(lambda: told in trainer.why)
        await trainer.kill()
