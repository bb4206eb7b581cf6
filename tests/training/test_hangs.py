"""Nothing in a training waits without end: a peer that does not do its part, while its links live, is left out. In virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import pytest

from swarmnode.codec.frames import Frame, FrameKind
from swarmnode.codec.messages import KIND_OF, decode_body, encode_body
from swarmnode.codec.tensors import TensorInfo
from swarmnode.codec.training_messages import Done, Failed, StepReport
from swarmnode.compute.training.datasets.batches import Batches, Microbatch
from swarmnode.errors import ErrorCode, StepFailed
from swarmnode.net.memory.virtual_time import run_virtual
from swarmnode.plan.compression import LinkDurations
from swarmnode.swarm.records.manifest import TRAINING_CODECS
from swarmnode.swarm.records.run import Run
from swarmnode.training.worker.activation_compressor import ActivationCompressor
from swarmnode.training.worker.training_stage import TRAIN_PROTOCOL
from tests.peer.training_swarm import (
    StallingExecutor,
    TrainingSwarm,
    Volunteer,
    local_losses,
    toy_batches,
    toy_run,
    until,
)
from tests.training.sabotage import Ill, Saboteur, wrapping

STEPS = 4
LONGEST_S = 300.0  # of virtual time, for the whole training


class EvenDurations(LinkDurations):
    """Of links that all take a second, so that top-k keeps as few elements as the run says."""

    def record(self, link: Hashable, values: Sequence[TensorInfo], bandwidth_bps: float | None) -> float | None:
        self._now_s[link] = 1.0
        return 1.0


class Scenario:
    """Three units with two replicas each, and a trainer; the peers of `ill`, by number, are sabotaged. `settings` are of the
    run: if they have codecs, losses need only be near those of one process."""

    def __init__(self, folder: Path, ill: dict[int, Saboteur] | None = None, **settings: Any) -> None:
        self.swarm = TrainingSwarm(folder, wrap=wrapping(lambda: self.swarm.world, ill or {}, TRAIN_PROTOCOL))
        self.batches = toy_batches()
        self.run = toy_run(self.batches, STEPS, **settings)
        self._tolerance = 0.2 if settings else 1e-5
        self.losses: dict[int, float] = {}
        self.waits: list[str] = []
        self.on_step: Callable[[int], object] = lambda _step: None

    async def join(self, *units: int) -> None:
        for unit in units:
            volunteer = await self.swarm.join(unit, unit + 1)
            volunteer.stage.compressor = ActivationCompressor("none", TRAINING_CODECS)
            volunteer.stage.compressor.codecs.durations = EvenDurations()

    async def train(self, batches: Batches | None = None) -> None:
        """One trainer, until all steps are done; its losses are those of one process."""
        _, trainer = await self.swarm.trainer(self.run, batches or self.batches, self._step, self._wait)
        assert await asyncio.wait_for(trainer.train(asyncio.Event()), LONGEST_S) == STEPS
        found = [self.losses[step] for step in sorted(self.losses)]
        assert found == pytest.approx(local_losses(self.run, self.batches), rel=self._tolerance)

    def _step(self, report: StepReport) -> None:
        self.losses[report.step] = report.loss
        self.on_step(report.step)

    def _wait(self, why: str, _missing: tuple[int, ...]) -> None:
        self.waits.append(why)


def in_scenario(
    folder: Path, test: Callable[[Scenario], Awaitable[None]], settings: Any = None, **ill: Saboteur
) -> None:
    async def scenario() -> None:
        by_number = {int(name.removeprefix("peer_")): saboteur for name, saboteur in ill.items()}
        scene = Scenario(folder, by_number, **(settings or {}))
        try:
            await test(scene)
        finally:
            await scene.swarm.close()

    run_virtual(scenario())


def executor_of(scene: Scenario, number: int) -> StallingExecutor:
    executor = scene.swarm.volunteers[number].executor
    assert isinstance(executor, StallingExecutor)
    return executor


@pytest.mark.parametrize("victim", [0, 1, 3, 5])
def test_a_compute_thread_that_stands_still(tmp_path: Path, victim: int) -> None:
    """Its loop answers PING; the first one also coordinates."""

    async def test(scene: Scenario) -> None:
        await scene.join(0, 0, 1, 1, 2, 2)
        scene.on_step = lambda step: executor_of(scene, victim).stall() if step == 1 else None
        await scene.train()
        ill = scene.swarm.volunteers[victim].peer
        assert any(ill[-8:] in text for text in scene.waits), "the user hears who it is"

    in_scenario(tmp_path, test)


def test_a_replica_that_fails_is_not_asked_again_at_once(tmp_path: Path) -> None:
    saboteur = Saboteur(Ill.FAILS, 1)

    async def test(scene: Scenario) -> None:
        await scene.join(0, 1, 1, 2)
        await scene.train()
        assert saboteur.count < 200, "it was left alone"

    in_scenario(tmp_path, test, peer_2=saboteur)


def test_a_coordinator_that_says_nothing_but_pong(tmp_path: Path) -> None:
    async def test(scene: Scenario) -> None:
        await scene.join(0, 0, 1, 1, 2, 2)
        await scene.train()
        assert scene.swarm.volunteers[1].stage.following.coordinator != scene.swarm.volunteers[0].peer

    in_scenario(tmp_path, test, peer_0=Saboteur(Ill.PINGS, 60))


class Withheld(Batches):
    """Data that never comes."""

    def __init__(self, batches: Batches) -> None:
        self.fingerprint = batches.fingerprint
        self._batches = batches

    def samples(self, run: Run) -> int:
        return self._batches.samples(run)

    def rows(self, numbers: list[int], run: Run) -> Microbatch:
        return self._batches.rows(numbers, run)


def test_a_feeder_that_takes_leases_and_never_feeds(tmp_path: Path) -> None:
    async def test(scene: Scenario) -> None:
        await scene.join(0, 0, 1, 1, 2, 2)
        _, idle = await scene.swarm.trainer(scene.run, scene.batches, lambda _report: None)
        feeding = asyncio.ensure_future(idle.train(asyncio.Event()))
        await until(lambda: saboteur.tripped, "it takes leases")
        await scene.train()
        feeding.cancel()
        await asyncio.gather(feeding, return_exceptions=True)

    saboteur = Saboteur(Ill.PINGS, 4)
    in_scenario(tmp_path, test, peer_6=saboteur)


@pytest.mark.parametrize("after", [4, 12, 30])
def test_a_hop_that_never_returns_gradients(tmp_path: Path, after: int) -> None:
    async def test(scene: Scenario) -> None:
        await scene.join(0, 0, 1, 1, 2, 2)
        await scene.train()

    in_scenario(tmp_path, test, peer_3=Saboteur(Ill.PINGS, after))


def test_the_only_one_that_holds_a_unit_is_named(tmp_path: Path) -> None:
    """Nothing can go on; the user hears for whom the swarm waits."""

    async def test(scene: Scenario) -> None:
        await scene.join(0, 1, 2)
        scene.on_step = lambda step: executor_of(scene, 1).stall() if step == 1 else None
        training = asyncio.ensure_future(scene.train())
        ill = scene.swarm.volunteers[1].peer
        await asyncio.wait({training, asyncio.ensure_future(asyncio.sleep(120))}, return_when="FIRST_COMPLETED")
        assert any(ill[-8:] in text for text in scene.waits[-3:]), scene.waits[-3:]
        training.cancel()
        await asyncio.gather(training, return_exceptions=True)

    in_scenario(tmp_path, test)


class Withholds(Saboteur):
    """Leads and talks, and gives out no work from its message `after` on."""

    def instead_of(self, frame: Frame) -> Frame | None:
        return None if self.tripped and frame.kind == FrameKind.LEASE else frame


@pytest.mark.parametrize("after", [1, 60])
def test_a_coordinator_that_gives_out_no_work(tmp_path: Path, after: int) -> None:
    """It is not followed any more, and cannot come back at once."""

    async def test(scene: Scenario) -> None:
        await scene.join(0, 0, 1, 1, 2, 2)
        await scene.train()
        assert scene.swarm.volunteers[1].stage.following.coordinator != scene.swarm.volunteers[0].peer

    in_scenario(tmp_path, test, peer_0=Withholds(Ill.PINGS, after))


def fail(volunteer: Volunteer, *, at_pass: int = 0) -> None:
    """From its pass of that number on, its device does what no torch program expects."""
    segment, forward = volunteer.segment, volunteer.segment.forward

    def failing(*arguments: Any) -> Any:
        if segment.passes >= at_pass:
            raise RuntimeError("the card is full")
        return forward(*arguments)

    segment.forward = failing  # type: ignore[method-assign]


def mend(volunteer: Volunteer) -> None:
    del volunteer.segment.forward


@pytest.mark.parametrize(("unit", "holders"), [(0, 1), (0, 2), (1, 1), (2, 3)])
@pytest.mark.parametrize("at_pass", [0, 6])  # of 24 by all holders
def test_a_step_that_fails_at_every_holder_ends_the_run_with_the_cause(
    tmp_path: Path, unit: int, holders: int, at_pass: int
) -> None:
    """The trainer hears why; once the cause is gone, the same run goes on."""

    async def test(scene: Scenario) -> None:
        await scene.join(*(unit,) * holders, *{0, 1, 2} - {unit})
        for volunteer in scene.swarm.volunteers[:holders]:
            fail(volunteer, at_pass=at_pass)
        for _ in range(2):
            with pytest.raises(
                StepFailed, match=rf"fails at every peer that holds layer {unit}, at last: peer .* INTERNAL"
            ):
                await scene.train()
        for volunteer in scene.swarm.volunteers[:holders]:
            mend(volunteer)
        await scene.train()

    in_scenario(tmp_path, test)


def test_a_step_that_fails_at_one_of_two_holders_goes_on(tmp_path: Path) -> None:
    async def test(scene: Scenario) -> None:
        await scene.join(0, 0, 1, 2)
        fail(scene.swarm.volunteers[1])
        await scene.train()

    in_scenario(tmp_path, test)


def test_a_trainer_that_slanders_the_only_holder_ends_the_run_for_nobody_else(tmp_path: Path) -> None:
    """It says of every microbatch that the last stage has failed it."""

    class Slanderer(Saboteur):
        def instead_of(self, frame: Frame) -> Frame | None:
            if frame.kind != FrameKind.DONE:
                return frame
            done = decode_body(frame.kind, frame.body)
            assert isinstance(done, Done)
            self.count += 1
            told = Failed(done.lease, last.peer, ErrorCode.INTERNAL, run=done.run)
            return Frame(KIND_OF[Failed], frame.channel, frame.seq, encode_body(told))

    async def test(scene: Scenario) -> None:
        nonlocal last
        await scene.join(0, 1, 2)
        last = scene.swarm.volunteers[2]
        _, slandering = await scene.swarm.trainer(scene.run, scene.batches, lambda _report: None)
        feeding = asyncio.ensure_future(slandering.train(asyncio.Event()))
        await until(lambda: slanderer.count > 3, "it slanders")
        await scene.train()
        feeding.cancel()
        await asyncio.gather(feeding, return_exceptions=True)

    last: Any = None
    slanderer = Slanderer(Ill.PINGS, 0)
    in_scenario(tmp_path, test, peer_3=slanderer)
