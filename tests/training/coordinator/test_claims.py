"""NaN by the word of one stage: asked again, of another one where there is one, before it ends a run."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from swarmnode.codec.training_messages import Failed
from swarmnode.errors import ErrorCode, NotFinite
from swarmnode.plan.training.coordination import Phase
from tests.peer.training_swarm import Volunteer, until
from tests.training.test_hangs import STEPS, Scenario, in_scenario


def claim(volunteer: Volunteer, unit: int) -> None:
    """As of a device that computes NaN where others do not."""
    line = volunteer.stage.following.line
    assert line is not None
    line.send(Failed(0, "", ErrorCode.NOT_FINITE, unit, volunteer.stage.state.run_id))


def phase_of(volunteer: Volunteer) -> Phase:
    return volunteer.election.phase


def test_one_replicas_word_stops_no_run(tmp_path: Path) -> None:
    async def test(scene: Scenario) -> None:
        await scene.join(0, 1, 1, 2)
        scene.on_step = lambda step: [claim(scene.swarm.volunteers[2], 1) for _ in range(3)] if step == 1 else None
        await scene.train()

    in_scenario(tmp_path, test)


def test_two_replicas_word_stops_it(tmp_path: Path) -> None:
    async def test(scene: Scenario) -> None:
        await scene.join(0, 1, 1, 2)
        scene.on_step = lambda step: [claim(scene.swarm.volunteers[n], 1) for n in (1, 2)] if step == 1 else None
        with pytest.raises(NotFinite, match="layer 1"):
            await scene.train()

    in_scenario(tmp_path, test)


def test_the_only_holder_is_asked_twice(tmp_path: Path) -> None:
    async def test(scene: Scenario) -> None:
        await scene.join(0, 1, 2)
        scene.on_step = lambda step: claim(scene.swarm.volunteers[1], 1) if step == 0 else None
        await scene.train()

    in_scenario(tmp_path, test)


def test_a_claim_while_roll_is_called_changes_nothing(tmp_path: Path) -> None:
    """It is about a lease of before: where it is true, it will be met again."""

    async def test(scene: Scenario) -> None:
        await scene.join(0, 1)
        coordinator, stage = scene.swarm.volunteers
        training = asyncio.ensure_future(scene.train())
        await until(lambda: stage.stage.following.coordinator == coordinator.peer, "a coordinator")
        assert phase_of(coordinator) is Phase.RENDEZVOUS, "unit 2 has nobody"
        for volunteer in scene.swarm.volunteers:
            claim(volunteer, volunteer.segment.start)
        await asyncio.sleep(2.0)
        assert phase_of(coordinator) is Phase.RENDEZVOUS
        await scene.join(2)
        await training
        assert len(scene.losses) == STEPS

    in_scenario(tmp_path, test)
