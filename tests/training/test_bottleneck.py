"""A swarm whose model has a bottleneck draws the loss curve of one process, also if a replica is killed."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.training.datasets.batches import ArrayBatches
from swarmnode.compute.training.lm import load_segment
from swarmnode.compute.training.local import train_locally
from tests.compute.training.conftest import LENGTH
from tests.compute.training.test_bottleneck import RANK, found
from tests.net.virtual import in_virtual_time_with
from tests.peer.training_swarm import TrainingSwarm
from tests.training.test_training import STEPS, Curve, short_run, train


class ThinSwarm(TrainingSwarm):
    """Swarm of a Llama of three units."""

    def __init__(self, folder: Path) -> None:
        found(folder, "llama")
        self.checkpoint = Checkpoint(folder / "weights")
        super().__init__(folder, segment_of=lambda start, end: load_segment(self.checkpoint, start, end))


@in_virtual_time_with(ThinSwarm)
async def test_losses_are_those_of_one_process_with_a_kill(swarm: ThinSwarm) -> None:
    for unit in (0, 0, 1, 1, 2, 2):
        await swarm.join(unit, unit + 1)
    ids = np.random.default_rng(0).integers(0, 256, (32, LENGTH))
    batches = ArrayBatches({"ids": ids, "labels": ids}, ["ids"], ["labels"])
    run = short_run(batches, STEPS)
    curve = Curve(after_3=lambda: swarm.kill(swarm.volunteers[3]))
    assert await train(swarm, run, batches, curve) == STEPS
    local = train_locally(load_segment(swarm.checkpoint, 0, 3), run, batches)
    curve.assert_equals([report.loss for report in local])
    swarm.assert_replicas_are_equal()
    widths = {
        one.shape[0] for _, replicas in swarm.replicas() for name, one in replicas[0].items() if "thin_out" in name
    }
    assert widths == {RANK}
