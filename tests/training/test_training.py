"""The swarm draws the loss curve of one process, whoever dies or joins: the whole conversation on the fake network."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from swarmnode.codec.tensors import Codec, DType, TensorInfo
from swarmnode.codec.training_messages import Forward, StepReport
from swarmnode.compute.training.datasets.batches import ArrayBatches, Batches
from swarmnode.compute.training.device_learners import DeviceLearners
from swarmnode.errors import NotFinite, UsageError
from swarmnode.ledger import Account
from swarmnode.net.interfaces import Buffer
from swarmnode.swarm.records.run import Run
from swarmnode.training.spot_checks.step_records import StoredMicrobatch
from swarmnode.training.worker.admission import ReceivedLabels
from tests.compute.training.toy import CLASSES, FEATURES
from tests.net.virtual import in_virtual_time_with
from tests.peer.training_swarm import (
    ACTIVATION_BYTES,
    BOUNDARY_BYTES,
    PATIENCE_S,
    TrainingSwarm,
    Volunteer,
    local_losses,
    toy_batches,
    toy_run,
    until,
)

STEPS = 8
BATCH = 16
Event = Callable[[], None]


in_swarm = in_virtual_time_with(TrainingSwarm)


def short_run(batches: Batches, steps: int, **settings: Any) -> Run:
    """Of two microbatches for each of two replicas."""
    return toy_run(batches, steps, batch=BATCH, **settings)


class Curve:
    """The losses that a trainer hears; `events` happen when a step is over."""

    def __init__(self, **events: Event) -> None:
        self.losses: dict[int, float] = {}
        self.reports: list[StepReport] = []
        self.missing: list[tuple[int, ...]] = []
        self._events = {int(name.removeprefix("after_")): event for name, event in events.items()}

    def __call__(self, report: StepReport) -> None:
        assert report.step not in self.losses, "each step is reported once"
        self.losses[report.step] = report.loss
        self.reports.append(report)
        if report.step in self._events:
            self._events[report.step]()

    def wait(self, _why: str, missing: tuple[int, ...]) -> None:
        if missing:
            self.missing.append(missing)

    def assert_equals(self, expected: list[float]) -> None:
        assert [self.losses[step] for step in sorted(self.losses)] == pytest.approx(expected, rel=1e-5)


async def train(swarm: TrainingSwarm, run: Run, batches: Batches, curve: Curve) -> int:
    """One trainer until the end; what it returns."""
    _, trainer = await swarm.trainer(run, batches, curve, curve.wait)
    done = await asyncio.wait_for(trainer.train(asyncio.Event()), PATIENCE_S)
    await swarm.settled(done)
    return done


@pytest.mark.parametrize("replicas", [1, 2])
@in_swarm
async def test_losses_are_those_of_one_process(swarm: TrainingSwarm, replicas: int) -> None:
    for unit in range(3):
        for _ in range(replicas):
            await swarm.join(unit, unit + 1)
    batches = toy_batches()
    run, curve = short_run(batches, STEPS), Curve()
    assert await train(swarm, run, batches, curve) == STEPS
    curve.assert_equals(local_losses(run, batches))
    swarm.assert_replicas_are_equal()
    assert {report.peers for report in curve.reports} == {3 * replicas}


@in_swarm
async def test_the_inputs_go_to_the_ends_alone(swarm: TrainingSwarm) -> None:
    seen: dict[int, set[tuple[tuple[TensorInfo, ...], tuple[TensorInfo, ...]]]] = {0: set(), 1: set(), 2: set()}

    def watch(volunteer: Volunteer, unit: int) -> None:
        remember = volunteer.spot_checks.remember

        def note(
            learner: DeviceLearners, body: Forward, payload: Buffer, labels: ReceivedLabels | None
        ) -> StoredMicrobatch | None:
            seen[unit].add((body.values, () if labels is None else labels.body.values))
            return remember(learner, body, payload, labels)

        volunteer.spot_checks.remember = note  # type: ignore[method-assign]

    for unit in range(3):
        watch(await swarm.join(unit, unit + 1), unit)
    batches = toy_batches()
    run, curve = short_run(batches, 2), Curve()
    assert await train(swarm, run, batches, curve) == 2
    floats = TensorInfo(Codec.NONE, DType.FLOAT32, (run.microbatch, FEATURES))
    labels = TensorInfo(Codec.NONE, DType.INT64, (run.microbatch,))
    assert seen == {0: {((floats,), ())}, 1: {((floats,), ())}, 2: {((floats,), (labels,))}}


@pytest.mark.parametrize("spans", [[(0, 2), (1, 3), (0, 1), (2, 3)], [(0, 3), (1, 2)]])
@in_swarm
async def test_spans_that_overlap(swarm: TrainingSwarm, spans: list[tuple[int, int]]) -> None:
    for start, end in spans:
        await swarm.join(start, end)
    batches = toy_batches()
    run, curve = short_run(batches, STEPS), Curve()
    assert await train(swarm, run, batches, curve) == STEPS
    curve.assert_equals(local_losses(run, batches))
    swarm.assert_replicas_are_equal()


@pytest.mark.parametrize("victim", [1, 3, 5])
@in_swarm
async def test_a_replica_is_killed(swarm: TrainingSwarm, victim: int) -> None:
    for unit in (0, 0, 1, 1, 2, 2):
        await swarm.join(unit, unit + 1)
    batches = toy_batches()
    run = short_run(batches, STEPS)
    curve = Curve(after_4=lambda: swarm.kill(swarm.volunteers[victim]))
    assert await train(swarm, run, batches, curve) == STEPS
    curve.assert_equals(local_losses(run, batches))
    swarm.assert_replicas_are_equal()
    assert curve.reports[-1].peers == 5


@in_swarm
async def test_what_is_left_of_overlapping_spans_counts_the_rest(swarm: TrainingSwarm) -> None:
    for start, end in ((0, 2), (0, 1), (1, 3), (2, 3)):
        await swarm.join(start, end)
    batches = toy_batches()
    run = short_run(batches, STEPS)
    victims = iter((swarm.volunteers[1], swarm.volunteers[3]))
    curve = Curve(after_4=lambda: swarm.kill(next(victims)), after_6=lambda: swarm.kill(next(victims)))
    assert await train(swarm, run, batches, curve) == STEPS
    curve.assert_equals(local_losses(run, batches))
    swarm.assert_replicas_are_equal()


@in_swarm
async def test_a_replica_joins_by_listening(swarm: TrainingSwarm) -> None:
    for unit in range(3):
        await swarm.join(unit, unit + 1)
    joining: list[asyncio.Task[object]] = []
    batches = toy_batches()
    run = short_run(batches, STEPS)
    curve = Curve(after_3=lambda: joining.append(asyncio.ensure_future(swarm.join(1, 2))))
    assert await train(swarm, run, batches, curve) == STEPS
    curve.assert_equals(local_losses(run, batches))
    swarm.assert_replicas_are_equal()
    assert curve.reports[-1].peers == 4, "the newcomer takes part"


@in_swarm
async def test_a_replica_joins_while_another_is_killed(swarm: TrainingSwarm) -> None:
    for unit in (0, 1, 1, 2):
        await swarm.join(unit, unit + 1)
    joining: list[asyncio.Task[object]] = []
    batches = toy_batches()
    run = short_run(batches, STEPS)
    curve = Curve(
        after_3=lambda: joining.append(asyncio.ensure_future(swarm.join(1, 2))),
        after_4=lambda: swarm.kill(swarm.volunteers[1]),
    )
    assert await train(swarm, run, batches, curve) == STEPS
    curve.assert_equals(local_losses(run, batches))
    swarm.assert_replicas_are_equal()
    assert curve.reports[-1].peers == 4, "the newcomer takes part"


@in_swarm
async def test_replicas_come_and_go_the_coordinator_too(swarm: TrainingSwarm) -> None:
    for unit in (0, 1, 2, 0, 1, 2):
        await swarm.join(unit, unit + 1)
    batches = toy_batches()
    run = short_run(batches, 2 * STEPS)
    joining: list[asyncio.Task[object]] = []

    def replace(number: int) -> Event:
        def event() -> None:
            victim = swarm.volunteers[number]
            swarm.kill(victim)
            joining.append(asyncio.ensure_future(swarm.join(victim.segment.start, victim.segment.end)))

        return event

    curve = Curve(after_3=replace(4), after_6=replace(2), after_9=replace(0), after_12=replace(7))
    assert await train(swarm, run, batches, curve) == 2 * STEPS
    curve.assert_equals(local_losses(run, batches))
    swarm.assert_replicas_are_equal()
    assert len(joining) == 4


@in_swarm
async def test_a_trainer_is_killed_and_another_goes_on(swarm: TrainingSwarm) -> None:
    for unit in (0, 1, 1, 2):
        await swarm.join(unit, unit + 1)
    batches = toy_batches()
    run = short_run(batches, STEPS)
    first_curve = Curve(after_4=lambda: swarm.world.kill(network.peer_id))
    network, first = await swarm.trainer(run, batches, first_curve)
    training = asyncio.ensure_future(first.train(asyncio.Event()))
    curve = Curve()
    assert await train(swarm, run, batches, curve) == STEPS
    training.cancel()
    await asyncio.gather(training, return_exceptions=True)
    assert len(first_curve.losses) < STEPS
    curve.assert_equals(local_losses(run, batches))


@in_swarm
async def test_a_later_trainer_hears_the_whole_curve(swarm: TrainingSwarm) -> None:
    await swarm.join(0, 3)
    batches = toy_batches()
    run, curve, later = short_run(batches, STEPS), Curve(), Curve()
    await train(swarm, run, batches, curve)
    assert await train(swarm, run, batches, later) == STEPS
    assert later.losses == curve.losses


@pytest.mark.parametrize("replicas", [1, 2])
@in_swarm
async def test_the_coordinator_is_killed(swarm: TrainingSwarm, replicas: int) -> None:
    for unit in [0, *[0, 1, 2] * replicas]:
        await swarm.join(unit, unit + 1)
    batches = toy_batches()
    run = short_run(batches, STEPS)
    eldest = swarm.volunteers[0]
    curve = Curve(after_4=lambda: swarm.kill(eldest))
    training = asyncio.ensure_future(train(swarm, run, batches, curve))
    await until(lambda: swarm.coordinator is eldest, "the eldest leads")
    assert await training == STEPS
    assert swarm.coordinator is swarm.volunteers[1]
    curve.assert_equals(local_losses(run, batches))
    swarm.assert_replicas_are_equal()


@in_swarm
async def test_a_replica_that_hangs_is_given_up(swarm: TrainingSwarm) -> None:
    for unit in (0, 1, 1, 2):
        await swarm.join(unit, unit + 1)
    batches = toy_batches()
    run = short_run(batches, STEPS)
    hanging = swarm.volunteers[2]

    def hang() -> None:
        hanging.alive = False
        swarm.world.hang(hanging.peer)

    curve = Curve(after_4=hang)
    assert await train(swarm, run, batches, curve) == STEPS
    curve.assert_equals(local_losses(run, batches))
    swarm.assert_replicas_are_equal()
    swarm.world.wake(hanging.peer)


@in_swarm
async def test_a_unit_without_peers_is_waited_for(swarm: TrainingSwarm) -> None:
    for unit in range(3):
        await swarm.join(unit, unit + 1)
    batches = toy_batches()
    run = short_run(batches, STEPS, checkpoint_steps=4)
    lost = swarm.volunteers[1]
    curve = Curve(after_6=lambda: swarm.kill(lost))
    training = asyncio.ensure_future(train(swarm, run, batches, curve))
    await until(lambda: bool(curve.missing), "the trainer hears what is missing")
    await swarm.join(1, 2, disk_of=lost)
    assert await training == STEPS
    assert set(curve.missing) == {(1,)}
    curve.assert_equals(local_losses(run, batches))


@in_swarm
async def test_a_loss_that_is_not_finite_stops_the_run(swarm: TrainingSwarm) -> None:
    await swarm.join(0, 1)
    await swarm.join(1, 2, breaks=1)
    await swarm.join(2, 3)
    batches = toy_batches()
    curve = Curve()
    with pytest.raises(NotFinite):
        await train(swarm, short_run(batches, STEPS), batches, curve)
    assert not curve.losses


@in_swarm
async def test_another_run_is_refused_until_the_first_is_over(swarm: TrainingSwarm) -> None:
    await swarm.join(0, 3)
    batches = toy_batches()
    run, other = short_run(batches, STEPS), short_run(batches, STEPS, seed=1)
    curve = Curve()
    training = asyncio.ensure_future(train(swarm, run, batches, curve))
    await until(lambda: len(curve.losses) == 2, "the first run is on its way")
    with pytest.raises(UsageError, match="other settings"):
        await train(swarm, other, batches, Curve())
    assert len(curve.losses) < STEPS
    assert await training == STEPS
    curve.assert_equals(local_losses(run, batches))


@in_swarm
async def test_who_joins_in_the_first_step_of_a_later_run_begins_as_the_others_do(swarm: TrainingSwarm) -> None:
    for unit in range(3):
        await swarm.join(unit, unit + 1)
    batches = toy_batches()
    await train(swarm, short_run(batches, 2), batches, Curve())
    curve = Curve()
    training = asyncio.ensure_future(train(swarm, short_run(batches, 2, seed=1), batches, curve))
    await until(lambda: all(volunteer.stage.state.step == 0 and volunteer.ready for volunteer in swarm.live), "step 0")
    newcomer = await swarm.join(1, 2)
    await until(lambda: newcomer.ready, "the newcomer is ready")
    assert not curve.losses, "it is the first step still"
    assert await training == 2
    assert curve.reports[-1].peers == 4, "the newcomer takes part"
    swarm.assert_replicas_are_equal()


@in_swarm
async def test_other_data_is_refused(swarm: TrainingSwarm) -> None:
    await swarm.join(0, 3)
    batches = toy_batches()
    training = asyncio.ensure_future(train(swarm, short_run(batches, STEPS), batches, curve := Curve()))
    await until(lambda: len(curve.losses) == 1, "the first run is on its way")
    zeros = {"x": np.zeros((8, FEATURES), np.float32), "labels": np.zeros(8, np.int64) % CLASSES}
    with pytest.raises(UsageError):
        await train(swarm, short_run(others := ArrayBatches(zeros), STEPS), others, Curve())
    assert len(curve.losses) < STEPS
    assert await training == STEPS


@in_swarm
async def test_where_memory_is_short_microbatches_wait_for_one_another(swarm: TrainingSwarm) -> None:
    """Stages that have room for one at a time answer BUSY to others; the curve is the same, and nothing stays taken."""
    volunteers = [await swarm.join(0, 2), await swarm.join(2, 3)]
    for volunteer in volunteers:
        volunteer.ledger.limit_bytes = 1
    batches = toy_batches()
    run, curve = short_run(batches, STEPS), Curve()
    assert await train(swarm, run, batches, curve) == STEPS
    curve.assert_equals(local_losses(run, batches))
    kept_bytes = [
        2 * BOUNDARY_BYTES + 2 * ACTIVATION_BYTES,
        BOUNDARY_BYTES + 2 * ACTIVATION_BYTES,
    ]  # one, and the pass that runs, with the graph that it computes again
    assert [one.ledger.accounts()[Account.ACTIVATIONS] for one in volunteers] == kept_bytes
