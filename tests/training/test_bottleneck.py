"""A swarm whose model has a bottleneck: the loss curve of one process, also with a kill, and lies in its few numbers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.training.datasets.batches import ArrayBatches
from swarmnode.compute.training.learner import Learner
from swarmnode.compute.training.lm import load_segment
from swarmnode.compute.training.local import train_locally
from swarmnode.net.interfaces import PeerId
from swarmnode.plan.audits import AuditBudget
from swarmnode.swarm.records.run import Averaging
from swarmnode.training.worker import training_parts
from tests.compute.training.conftest import LENGTH
from tests.compute.training.test_bottleneck import RANK, found
from tests.net.virtual import in_virtual_time_with
from tests.peer.training_swarm import TrainingSwarm
from tests.training.test_spot_checks import LIES_FROM, FalseLearner
from tests.training.test_training import STEPS, Curve, short_run, train

Lie = Callable[[Tensor], Tensor]
LIAR = 3  # one of three holders of the middle unit, which sends and takes codes
SPANS = ((0, 1), (1, 2), (1, 2), (1, 2), (2, 3))


def one_number(code: Tensor) -> Tensor:
    """Change one of the R numbers of each token."""
    return torch.cat([code[..., :1] + code.std(), code[..., 1:]], dim=-1)


LIES: Mapping[str, Lie] = {
    "one number": one_number,
    "turned round": torch.neg,
    "swapped": lambda code: code.flip(-1),
    "a drift of 1 %": lambda code: 1.01 * code,
    "another token": lambda digits: digits ^ 1,
}


class FalseSender(FalseLearner):
    """It `names` other tokens to the next stage than those that it got."""

    names: Lie | None = None

    def forward(self, lease: int, index: int, start: int, end: int, values: Any, labels: Any = ()) -> Any:
        outputs = super().forward(lease, index, start, end, values, labels)
        if self.names is None or self.step < LIES_FROM:
            return outputs
        return (outputs[0], self.names(outputs[1]), *outputs[2:])


class ThinSwarm(TrainingSwarm):
    """Swarm of a Llama of three units, with anchors."""

    def __init__(self, folder: Path) -> None:
        found(folder, "llama")
        self.checkpoint = Checkpoint(folder / "weights")
        super().__init__(folder, segment_of=lambda start, end: load_segment(self.checkpoint, start, end))
        ids = np.random.default_rng(0).integers(0, 256, (32, LENGTH))
        self.batches = ArrayBatches({"ids": ids, "labels": ids}, ["ids"], ["labels"])

    async def found_false(self, what: str, lie: Lie, *, share: float = 1.0, robust: bool = False) -> set[PeerId]:
        """Train with a holder of the middle unit that tells lies in what it `sends`, `names`, `returns` or `adds`, and return the
        peers that are left out. `share`: what the holders spend on checks."""
        joined = [await self.join(*span) for span in SPANS]
        for volunteer in joined:
            volunteer.spot_checks.budget = AuditBudget(share)
        real, false = Learner, joined[LIAR].segment

        def make(segment: Any, *arguments: Any, **named: Any) -> Learner:
            learner = (FalseSender if segment is false else real)(segment, *arguments, **named)
            if segment is false:
                setattr(learner, what, lie)
            return learner

        training_parts.Learner = make  # type: ignore[assignment,misc]
        try:
            run = short_run(self.batches, STEPS, averaging=Averaging(robust=robust))
            _, trainer = await self.trainer(run, self.batches, Curve(), lambda *_: None)
            await asyncio.wait_for(trainer.train(asyncio.Event()), 300.0)
        finally:
            training_parts.Learner = real  # type: ignore[misc]
        return set(trainer.left_out)


in_thin_swarm = in_virtual_time_with(ThinSwarm)


async def check_losses(swarm: ThinSwarm, spans: Sequence[tuple[int, int]]) -> None:
    """Train with a kill, and compare the losses with those of one process."""
    for span in spans:
        await swarm.join(*span)
    run = short_run(swarm.batches, STEPS)
    curve = Curve(after_3=lambda: swarm.kill(swarm.volunteers[3]))
    assert await train(swarm, run, swarm.batches, curve) == STEPS
    local = train_locally(load_segment(swarm.checkpoint, 0, 3), run, swarm.batches)
    curve.assert_equals([report.loss for report in local])
    swarm.assert_replicas_are_equal()
    widths = {
        one.shape[0] for _, replicas in swarm.replicas() for name, one in replicas[0].items() if "thin_out" in name
    }
    assert widths == {RANK}


@in_thin_swarm
async def test_losses_are_those_of_one_process_with_a_kill(swarm: ThinSwarm) -> None:
    await check_losses(swarm, [(unit, unit + 1) for unit in (0, 0, 1, 1, 2, 2)])


@in_thin_swarm
async def test_losses_are_the_same_where_a_boundary_is_not_cut(swarm: ThinSwarm) -> None:
    await check_losses(swarm, [(0, 1), (0, 2), (1, 3), (1, 3), (2, 3)])


@pytest.mark.parametrize(
    ("what", "lie"),
    [
        ("sends", "one number"),
        ("names", "another token"),
        ("sends", "a drift of 1 %"),
        ("returns", "swapped"),
        ("adds", "turned round"),
    ],
)
@in_thin_swarm
async def test_lies_in_the_numbers_are_found(swarm: ThinSwarm, what: str, lie: str) -> None:
    assert await swarm.found_false(what, LIES[lie]) == {swarm.volunteers[LIAR].peer}


@in_thin_swarm
async def test_lies_are_found_beside_robust_averaging(swarm: ThinSwarm) -> None:
    assert await swarm.found_false("sends", one_number, robust=True) == {swarm.volunteers[LIAR].peer}
