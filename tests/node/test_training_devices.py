"""A node with several devices trains on all of them, and the curve is that of one process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from swarmnode.codec.training_messages import Reduce
from swarmnode.compute.capacity.capacity import limit_bytes_for, training_sizes
from swarmnode.compute.executor import Urgency, WorkItem
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.training.learner import Learner
from swarmnode.errors import ExecutorDied
from swarmnode.ledger import Account
from swarmnode.training.coordinator.worker_group import Line
from swarmnode.training.worker.training_stage import TrainingStage
from tests.net.virtual import in_virtual_time
from tests.node.conftest import Founded
from tests.node.test_devices import cores, held  # noqa: F401
from tests.node.test_training import DATA, SETTINGS, School, school_of
from tests.node.virtual_swarm import PASS_S, VirtualMember
from tests.training_results import assert_same_curve, assert_same_parameters, losses_of_one_process

STEPS = 2
RUN = msgspec.structs.replace(SETTINGS, steps=STEPS, warmup_steps=1, batch=12, microbatch=3)
CACHE_TOKENS = 64


@pytest.fixture(scope="module")
def alone(gpt2: Path, training: Founded) -> dict[int, float]:
    return losses_of_one_process(training.swarm.manifest, gpt2, DATA, RUN)


def by_position(item: WorkItem) -> float:
    return PASS_S * max(1, item.size)


def node(school: School, model: Path, name: str, share: float, devices: int = 2) -> VirtualMember:
    """Of so many devices, each of which has room for so much of the model."""
    sizes = training_sizes(Checkpoint(model))
    memory_bytes = devices * limit_bytes_for(int(share * sizes.need_bytes(0, len(sizes.weight_bytes), 0)))
    lent = {"memory_bytes": memory_bytes, "cache_tokens": CACHE_TOKENS, "threads": 1}
    device = ",".join(f"cpu:{number}" for number in range(devices))
    return school.node(name, cost_s=by_position, compress="none", device=device, **lent)


async def train(school: School) -> tuple[dict[int, float], float]:
    """Losses by step, and the seconds of the whole run."""
    school.steps = STEPS
    began_s = asyncio.get_running_loop().time()
    trainer = school.trainer("trainer", DATA, RUN)
    assert await trainer.finish() == STEPS
    return trainer.losses, asyncio.get_running_loop().time() - began_s


@in_virtual_time
async def test_the_curve_of_one_process_in_half_the_time(
    training: Founded, gpt2: Path, alone: dict[int, float], tmp_path: Path
) -> None:
    took_s = {}
    for devices in (1, 2):
        folder = tmp_path / str(devices)
        folder.mkdir()
        async with school_of(training, folder) as school:
            here = node(school, gpt2, "here", 1.5, devices)
            await here.wait_for("ready")
            losses, took_s[devices] = await train(school)
            assert_same_curve(losses, alone, steps=STEPS)
            await here.stop()
            assert held(here, Account.WEIGHTS) == held(here, Account.ACTIVATIONS) == held(here, Account.GRADIENTS) == 0
    assert took_s[2] < 0.65 * took_s[1]


@in_virtual_time
async def test_nodes_of_several_devices_agree(
    training: Founded, gpt2: Path, alone: dict[int, float], tmp_path: Path
) -> None:
    names = {"over both": 0.7, "on each": 1.5}
    async with school_of(training, tmp_path) as school:
        for name, share in names.items():
            await node(school, gpt2, name, share).wait_for("ready")
        losses, _ = await train(school)
        assert_same_curve(losses, alone, steps=STEPS)
        await school.stop(list(names))
        assert_same_parameters(school, list(names), spans=1)


@in_virtual_time
async def test_a_device_without_memory_breaks_off_a_pass_and_nothing_counts_twice(
    training: Founded,
    gpt2: Path,
    alone: dict[int, float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the midst of the way back, at the device behind, once it has counted others."""
    backward, broken = Learner.backward, iter([False, False, True, False, False, True])

    def break_off(learner: Learner, lease: int, grads: Any) -> Any:
        if learner.segment.end == learner.segment.units and next(broken, False):
            monkeypatch.setattr(torch.autograd, "backward", out_of_memory)
        try:
            return backward(learner, lease, grads)
        finally:
            monkeypatch.setattr(torch.autograd, "backward", real)

    def out_of_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    real = torch.autograd.backward
    monkeypatch.setattr(Learner, "backward", break_off)
    async with school_of(training, tmp_path) as school:
        await node(school, gpt2, "node", 0.7).wait_for("ready")
        losses, _ = await train(school)
        assert next(broken, None) is None
        assert_same_curve(losses, alone, steps=STEPS)


@in_virtual_time
async def test_counts_that_are_lost_unheard_are_counted_again(
    training: Founded, gpt2: Path, alone: dict[int, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a trainer's word that a microbatch is done comes after the stage's that it is lost."""
    reduce, losing = TrainingStage._reduce, iter([True])

    async def lose_and_reduce(stage: TrainingStage, line: Line, body: Reduce) -> None:
        if next(losing, False):
            await stage.shared_executor.call(Urgency.CONTROL, stage.state.learner.discard, kind="discard gradients")
        await reduce(stage, line, body)

    monkeypatch.setattr(TrainingStage, "_reduce", lose_and_reduce)
    async with school_of(training, tmp_path) as school:
        await node(school, gpt2, "node", 1.4, devices=1).wait_for("ready")
        losses, _ = await train(school)
        assert next(losing, None) is None
        assert_same_curve(losses, alone, steps=STEPS)


@in_virtual_time
async def test_a_device_that_is_lost_is_the_end_of_the_node(training: Founded, gpt2: Path, tmp_path: Path) -> None:
    async with school_of(training, tmp_path) as school:
        both = node(school, gpt2, "both", 0.7)
        await both.wait_for("ready")

        def lose() -> None:
            raise RuntimeError("CUDA error: device-side assert triggered")

        with pytest.raises(ExecutorDied):
            await both.node._executors[1].call(Urgency.CONTROL, lose, kind="lose the device")
        with pytest.raises(ExecutorDied, match="device-side assert"):
            await both.task
