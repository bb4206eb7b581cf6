"""Replicas that average in every way that a run may ask for, on the fake network; and one that dies or joins meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from swarmnode.codec.tensors import Codec
from swarmnode.codec.training_messages import StepReport
from swarmnode.compute.training import optimizer as adamw8bit
from swarmnode.compute.training.datasets.batches import Batches
from swarmnode.swarm.records.run import Averaging, Run
from tests.net.virtual import in_virtual_time
from tests.peer.training_swarm import PATIENCE_S, TrainingSwarm, local_losses, toy_batches, toy_run

STEPS = 12
LOSSY = {
    "bf16": Averaging(codec=Codec.BF16),
    "fp16": Averaging(codec=Codec.FP16),
    "int8": Averaging(codec=Codec.INT8),
    "int4": Averaging(codec=Codec.INT4),
    "top-k": Averaging(codec=Codec.TOPK, keep=0.25),
    "PowerSGD": Averaging(rank=1),
    "PowerSGD in fp16": Averaging(rank=1, codec=Codec.FP16),
    "ACP-SGD": Averaging(rank=1, alternating=True),
    "DiLoCo": Averaging(every=4),
    "DiLoCo in int8": Averaging(every=4, codec=Codec.INT8),
    "DiLoCo in int2": Averaging(every=4, codec=Codec.INT2),
}


def quick_run(batches: Batches, **settings: Any) -> Run:
    """Learns within few steps."""
    return toy_run(batches, STEPS, learning_rate=2e-2, batch=16, **settings)


@contextlib.asynccontextmanager
async def two_by_two(folder: Path) -> AsyncIterator[TrainingSwarm]:
    """Two stages of two replicas each."""
    swarm = TrainingSwarm(folder)
    for start, end in ((0, 2), (0, 2), (2, 3), (2, 3)):
        await swarm.join(start, end)
    yield swarm
    await swarm.close()


async def losses_of(
    swarm: TrainingSwarm, averaging: Averaging, after: dict[int, object] | None = None, optimizer: str = "adamw"
) -> list[float]:
    """The losses of a run; `after` a step something happens."""
    batches = toy_batches()
    losses: list[float] = []

    def on_step(report: StepReport) -> None:
        losses.append(report.loss)
        event = (after or {}).get(report.step)
        if event is not None:
            event()  # type: ignore[operator]

    run = quick_run(batches, averaging=averaging, optimizer=optimizer)
    _, trainer = await swarm.trainer(run, batches, on_step)
    assert await asyncio.wait_for(trainer.train(asyncio.Event()), PATIENCE_S) == STEPS
    await swarm.settled(STEPS)
    return losses


@functools.cache
def losses_alone() -> list[float]:
    """Of one process that averages nothing."""
    batches = toy_batches()
    return local_losses(quick_run(batches), batches)


def assert_close(losses: list[float], averaging: Averaging) -> None:
    """The loss falls as it does in one process that averages nothing."""
    alone = losses_alone()
    fallen = alone[0] - alone[-1]
    assert fallen > 0.15
    assert losses[0] == pytest.approx(alone[0], rel=1e-5), "the first step is computed before anything is averaged"
    slack = 0.5 if averaging.every > 1 else 0.25
    assert abs(losses[-1] - alone[-1]) < slack * fallen


@pytest.mark.parametrize("averaging", LOSSY.values(), ids=LOSSY)
@in_virtual_time
async def test_replicas_end_equal_and_have_learnt(tmp_path: Path, averaging: Averaging) -> None:
    async with two_by_two(tmp_path) as swarm:
        assert_close(await losses_of(swarm, averaging), averaging)
        swarm.assert_replicas_are_equal()


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("int8", "adamw8bit"),
        ("PowerSGD", "adamw"),
        ("ACP-SGD", "adamw"),
        ("DiLoCo", "adamw"),
        ("DiLoCo in int2", "muon"),
    ],
)
@in_virtual_time
async def test_a_replica_dies_and_another_joins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, optimizer: str
) -> None:
    monkeypatch.setattr(adamw8bit, "MIN_ELEMENTS", 1)  # of small models, too
    async with two_by_two(tmp_path) as swarm:
        joining: list[asyncio.Task[object]] = []
        after = {
            3: lambda: swarm.kill(swarm.volunteers[1]),
            5: lambda: joining.append(asyncio.ensure_future(swarm.join(0, 2))),
        }
        assert_close(await losses_of(swarm, LOSSY[name], after, optimizer), LOSSY[name])  # type: ignore[arg-type]
        await asyncio.gather(*joining)
        swarm.assert_replicas_are_equal()
