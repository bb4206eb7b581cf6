"""Optimisers in a swarm on the fake network: replicas, a death and a newcomer change no loss."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from swarmnode.codec.training_messages import StepReport
from tests.net.virtual import in_virtual_time
from tests.peer.training_swarm import PATIENCE_S, TrainingSwarm, local_losses, toy_batches, toy_run

STEPS = 8
RULES: dict[str, dict[str, Any]] = {
    "muon": {"momentum": 0.95},
    "lion": {"learning_rate": 1e-3},
    "schedule-free": {"schedule": "constant"},
    "eva": {"epsilon": 0.03, "clip": 1e-3, "momentum": 0.9, "learning_rate": 0.05},
}


@pytest.mark.parametrize("name", RULES)
@in_virtual_time
async def test_a_swarm_computes_what_one_process_does(tmp_path: Path, name: str) -> None:
    batches = toy_batches()
    run = toy_run(batches, STEPS, **{"learning_rate": 1e-2, "batch": 16, "optimizer": name, **RULES[name]})
    losses: list[float] = []
    async with TrainingSwarm(tmp_path) as swarm:
        for start, end in ((0, 2), (0, 2), (2, 3)):
            await swarm.join(start, end)
        joining: list[asyncio.Task[object]] = []

        def on_step(report: StepReport) -> None:
            losses.append(report.loss)
            if report.step == 2:
                swarm.kill(swarm.volunteers[1])
            if report.step == 4:
                joining.append(asyncio.ensure_future(swarm.join(0, 2)))

        _, trainer = await swarm.trainer(run, batches, on_step)
        assert await asyncio.wait_for(trainer.train(asyncio.Event()), PATIENCE_S) == STEPS
        await asyncio.gather(*joining)
        await swarm.settled(STEPS)
        swarm.assert_replicas_are_equal()
    assert losses == pytest.approx(local_losses(run, batches), rel=1e-5)
