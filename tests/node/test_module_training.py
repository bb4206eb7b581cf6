"""Any torch module, trained by whole nodes: skips over stages, batch norms, two replicas, the curve of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from swarmnode.client.training.client import TrainingClient
from swarmnode.client.training.preparation import NO_DATA, prepare
from swarmnode.compute.graph.graph_segment import load_segment
from swarmnode.compute.training.local import train_locally
from swarmnode.founding.model_source import from_module
from swarmnode.swarm.records.manifest import TRAIN
from swarmnode.swarm.records.run import Run
from tests.net.virtual import in_virtual_time
from tests.node.virtual_swarm import VirtualSwarm
from tests.vision import classifier, write_images

STEPS = 16
SETTINGS = Run(
    data=NO_DATA, steps=STEPS, batch=32, microbatch=8, sequence=0, learning_rate=3e-2, checkpoint_steps=8
)  # fmt: skip


@in_virtual_time
async def test_a_module_with_skips_and_batch_norms(tmp_path: Path) -> None:
    data = tmp_path / "images.npz"
    write_images(data)
    model = from_module("tests.vision:classifier", tmp_path / "weights", units=4)
    units = model.model.units
    assert units >= 2
    half = units // 2
    async with VirtualSwarm(tmp_path) as swarm:
        manifest = swarm.create(model, mode=TRAIN).manifest
        assert manifest is not None
        await swarm.bootstrap()
        for number, span in enumerate((f"0:{half}", f"{half}:{units}") * 2):
            swarm.node(f"node-{number}", span, compress="none")
        for member in swarm.members.values():
            await member.wait_for("ready")
        trainer = swarm.trainer("trainer", data, SETTINGS)
        assert await trainer.finish() == STEPS
        exporter = await TrainingClient.join(swarm.load(), swarm.folder / "homes" / "out", platform=swarm.platform())
        await exporter.export(tmp_path / "out", force=False, patience_s=30.0)
        await exporter.close()
    run, batches = prepare(manifest, model.folder, data, SETTINGS)
    segment = load_segment(model.folder, 0, units, device=torch.device("cpu"))
    alone = [report.loss for report in train_locally(segment, run, batches)]
    assert [trainer.losses[step] for step in range(STEPS)] == pytest.approx(alone, rel=1e-3)
    assert alone[-1] < 0.8 * alone[0]
    module, _ = classifier()
    module.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    assert int(module.get_buffer("enter.1.num_batches_tracked")) > 0
