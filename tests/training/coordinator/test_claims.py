"""NaN by the word of one stage: asked again, of another one where there is one, before it ends a run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swarmnode.codec.training_messages import Failed
from swarmnode.errors import ErrorCode, NotFinite
from swarmnode.plan.training.coordination import Event, Phase
from swarmnode.plan.training.step_ledger import OutstandingLease
from swarmnode.plan.view import Span
from swarmnode.tolerances import NAN_CLAIMS
from swarmnode.training.coordinator.averaging_groups import WarmStarts
from swarmnode.training.coordinator.link_times import Failures
from swarmnode.training.coordinator.step_loop import StepLoop
from tests.peer.training_swarm import Volunteer, toy_batches, toy_run, until
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


class Replicas:
    """Two stages of each of three layers, which can all be spared; also the dispatcher of a step loop."""

    def __init__(self) -> None:
        self.dismissed: list[str] = []
        self.apart: list[set[str]] = []

    def can_spare(self, peer: str) -> bool:
        return peer in "aAbBcC"

    def dismiss(self, peer: str, _reason: str) -> None:
        self.dismissed.append(peer)

    def separate(self, one: str, other: str) -> None:
        self.apart.append({one, other})

    def record_failure(self, _peer: str, *, is_trainer: bool) -> None:
        """Nothing rests: each claim is the next microbatch's."""

    def begin(self, _run: object, _ledger: object) -> None:
        """Nothing is leased by itself."""


def overflow(routes: Iterable[str], claimant: int) -> tuple[Replicas, Failures, StepLoop]:
    """The stage at the place `claimant` of each route says that its own layer met NaN, until the run stops."""
    replicas, failures = Replicas(), Failures(lambda: 0.0)
    office = SimpleNamespace(units=3, failures=failures, clock=lambda: 0.0)
    groups = SimpleNamespace(warm_starts=WarmStarts())
    shared: Any = (office, replicas, replicas, (), groups, lambda: False)
    loop = StepLoop(toy_run(toy_batches(), 3), 0, *shared)
    for lease, route in enumerate(routes):
        stages = tuple((peer, Span(unit, unit + 1)) for unit, peer in enumerate(route))
        loop._ledger.grant(OutstandingLease(lease, 0, stages, "trainer"))
        member: Any = SimpleNamespace(peer=route[claimant], span=Span(claimant, claimant + 1))
        loop.receive(member, Failed(lease, "", ErrorCode.NOT_FINITE, claimant, loop.run.id))
        if loop.has_come(Event.FAILED):
            break
    return replicas, failures, loop


@pytest.mark.parametrize("claimant", [0, 1, 2])
@pytest.mark.parametrize("liar", ["a", "b", "c"])
def test_a_stage_on_all_claimed_routes_is_dismissed_and_then_banned(liar: str, claimant: int) -> None:
    others = [("aA", "bB", "cC")[place] for place in range(3)]
    mixed = ["".join(route) for route in product(*others) if liar in route]
    replicas, failures, loop = overflow(3 * mixed, claimant)
    assert failures.banned == (liar,) and set(replicas.dismissed[-6:]) == {liar}
    assert not loop.has_come(Event.FAILED)
    assert all(mixed[0][claimant] in pair for pair in replicas.apart[:1])


def test_suspects_that_are_never_apart_take_turns_until_the_run_stops() -> None:
    replicas, failures, loop = overflow(1000 * ["abc"], 1)
    assert loop.has_come(Event.FAILED) and len(replicas.dismissed) < NAN_CLAIMS
    assert set(replicas.dismissed) == {"a", "b", "c"} and not failures.banned
