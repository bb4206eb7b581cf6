"""Losses are weighed by labels over whole nodes; a run that began without keeps its rule, whoever feeds it then."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from swarmnode.client.training import client
from swarmnode.client.training.preparation import NO_DATA, Prepared, prepare
from swarmnode.compute.graph.graph_segment import load_segment
from swarmnode.compute.training.local import train_locally
from swarmnode.founding.model_source import from_module
from swarmnode.swarm.records.manifest import TRAIN, Manifest
from swarmnode.swarm.records.run import Run
from tests.net.virtual import in_virtual_time
from tests.node.virtual_swarm import VirtualSwarm
from tests.tagger import save_data

STEPS = 8
SETTINGS = Run(data=NO_DATA, steps=STEPS, batch=8, microbatch=2, learning_rate=1e-2, checkpoint_steps=2)


def as_before(manifest: Manifest, folder: Path, data: Path, settings: Run, *_rules: object) -> Prepared:
    """What a trainer of before makes of the same data."""
    run, batches = prepare(manifest, folder, data, settings)
    assert run.weighs_labels
    return msgspec.structs.replace(run, label_weights=msgspec.UNSET), batches


@pytest.mark.parametrize("began_before", [False, True])
@in_virtual_time
async def test_a_run_keeps_the_rule_that_it_began_with(
    began_before: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data.npz"
    save_data(data, few=began_before)
    model = from_module("tests.tagger:tagger", tmp_path / "weights", units=4)
    half, units = model.model.units // 2, model.model.units
    async with VirtualSwarm(tmp_path) as swarm:
        manifest = swarm.create(model, mode=TRAIN).manifest
        assert manifest is not None
        await swarm.bootstrap()
        for number, span in enumerate((f"0:{half}", f"{half}:{units}")):
            swarm.node(f"node-{number}", span, compress="none")
        for member in swarm.members.values():
            await member.wait_for("ready")
        if began_before:
            monkeypatch.setattr(client, "prepare", as_before)
        first = swarm.trainer("first", data, SETTINGS)
        await first.wait_for_step(3)
        await first.kill()
        monkeypatch.setattr(client, "prepare", prepare)
        second = swarm.trainer("second", data, SETTINGS)
        assert await second.finish() == STEPS
    run, batches = (as_before if began_before else prepare)(manifest, model.folder, data, SETTINGS)
    segment = load_segment(model.folder, 0, units, device=torch.device("cpu"))
    alone = [report.loss for report in train_locally(segment, run, batches)]
    losses = {**second.losses, **first.losses}
    assert [losses[step] for step in range(STEPS)] == pytest.approx(alone, rel=1e-3)
