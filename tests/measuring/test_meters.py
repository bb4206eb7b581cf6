"""What clients, servers and training stages count, against what happened."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from swarmnode.client.training.client import TrainerMeter
from swarmnode.codec.tensors import Codec
from swarmnode.compute.training.local import StepSummary
from swarmnode.data.samples import DataSummary
from swarmnode.errors import ErrorCode, SwarmnodeError
from swarmnode.measuring.meters import BACKWARD, DECODE, FORWARD, PREFILL, SERVE, TRAIN, StageMeter
from swarmnode.metrics import table
from swarmnode.metrics.metric import Histogram, Metric, Readings
from swarmnode.plan.view import Span
from swarmnode.swarm.records.run import Run
from tests.net.virtual import in_virtual_time
from tests.peer.toy_swarm import ToySwarm, expected
from tests.peer.training_swarm import TrainingSwarm, toy_batches, toy_run

PROMPT = [5, 17, 3, 99, 42]
PATIENCE_S = 120.0


def figures(readings: Readings, metric: Metric) -> dict[tuple[str, ...], float]:
    """A metric's figures by labels; of a histogram how many there were. Zeros are left out."""
    found: dict[tuple[str, ...], float] = {}
    for reading in readings:
        value = reading.value.count if isinstance(reading.value, Histogram) else float(reading.value)
        if reading.metric is metric:
            assert reading.labels not in found and len(reading.labels) == len(metric.labels)
            found[reading.labels] = value
    return {labels: value for labels, value in found.items() if value}


# -- stages


def test_a_stage_counts_passes_by_phase() -> None:
    meter = StageMeter(Span(2, 5), SERVE)
    meter.record_pass(PREFILL, 0.5, microbatches=1, tokens=7, unit_tokens=21)
    for _ in range(2):
        meter.record_pass(DECODE, 0.25, microbatches=4, tokens=4, unit_tokens=12)
    expected_passes = {("2:5", PREFILL): 1, ("2:5", DECODE): 2}
    assert figures(meter.readings(), table.PASS_SECONDS) == expected_passes
    assert figures(meter.readings(), table.BATCH_SIZE) == expected_passes
    assert figures(meter.readings(), table.MICROBATCHES) == {("2:5", PREFILL): 1, ("2:5", DECODE): 8}
    assert figures(meter.readings(), table.TOKENS) == {("2:5", PREFILL): 7, ("2:5", DECODE): 8}
    assert figures(meter.readings(), table.UNIT_TOKENS) == {("2:5", PREFILL): 21, ("2:5", DECODE): 24}


def test_bytes_before_and_after_compression() -> None:
    meter = StageMeter(Span(0, 2), TRAIN)
    meter.record_tensors(Codec.INT8, FORWARD, raw_bytes=400, encoded_bytes=110)
    meter.record_tensors(Codec.INT8, FORWARD, raw_bytes=400, encoded_bytes=110)
    meter.record_tensors(Codec.NONE, BACKWARD, raw_bytes=64, encoded_bytes=64)
    forward, backward = ("0:2", TRAIN, "int8", FORWARD), ("0:2", TRAIN, "none", BACKWARD)
    assert figures(meter.readings(), table.TENSOR_RAW_BYTES) == {forward: 800, backward: 64}
    assert figures(meter.readings(), table.TENSOR_ENCODED_BYTES) == {forward: 220, backward: 64}


def test_causes_are_told_before_anything_has_failed() -> None:
    causes = [
        reading.labels[-1] for reading in StageMeter(Span(0, 2), SERVE).readings() if reading.metric is table.FAULTS
    ]
    assert causes == [code.name.lower() for code in ErrorCode]


# -- sessions


@in_virtual_time
async def test_a_generation_without_faults() -> None:
    swarm = await ToySwarm.start((0, 2), (2, 4))
    assert [token async for token in swarm.ring(PROMPT, 8)] == expected(PROMPT, 8)
    client = list(swarm.meter.readings())
    assert figures(client, table.CLIENT_TOKENS) == {(): 8}
    assert figures(client, table.FIRST_TOKEN_SECONDS) == {(): 1}
    assert figures(client, table.TOKEN_SECONDS) == {(): 7}
    assert figures(client, table.CLIENT_SESSIONS) == {("done",): 1}
    assert not figures(client, table.REROUTES)
    assert not figures(swarm.volunteers[0].worker.meter.readings(), table.FAULTS)


@in_virtual_time
async def test_a_peer_that_dies_is_a_fault_of_its_neighbour_and_a_reroute_of_the_client() -> None:
    swarm = await ToySwarm.start((0, 2), (2, 4), (2, 4))
    tokens = []
    async for token in swarm.ring(PROMPT, 12):
        tokens.append(token)
        if len(tokens) == 4:
            swarm.world.kill(swarm.volunteers[1].peer)
    assert tokens == expected(PROMPT, 12)
    assert figures(swarm.meter.readings(), table.REROUTES)["peer_lost",] >= 1
    assert figures(swarm.volunteers[0].worker.meter.readings(), table.FAULTS)["0:2", SERVE, "peer_lost"] >= 1


@in_virtual_time
async def test_how_generations_end() -> None:
    swarm = await ToySwarm.start((0, 2), (2, 4), cache_bytes=100)
    stream = aiter(swarm.ring(PROMPT, 8))
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]  # it is an async generator
    with pytest.raises(SwarmnodeError):
        await anext(aiter(swarm.ring(PROMPT, 1000)))
    assert figures(swarm.meter.readings(), table.CLIENT_SESSIONS) == {("left",): 1, ("failed",): 1}
    refused = figures(swarm.volunteers[0].server.readings(), table.REFUSALS)
    assert refused == {("0:2", "too_large"): 1}


# -- training


class Quiet:
    """A listener who keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[object] = []

    def begun(self, run: Run, _data: DataSummary) -> None:
        self.heard.append(run)

    def step(self, report: StepSummary) -> None:
        self.heard.append(report)

    def waiting(self, why: str, missing: tuple[int, ...]) -> None:
        self.heard.append((why, missing))


def test_a_trainer_tells_of_its_last_step_and_passes_on_what_it_hears() -> None:
    listener, run = Quiet(), toy_run(toy_batches(), 3)
    meter = TrainerMeter(listener)
    meter.begun(run, DataSummary(8, 64, 8, 0, 1.0))
    assert not figures(meter.readings(), table.TRAINER_LOSS)
    meter.waiting("for a holder", (2, 3))
    assert figures(meter.readings(), table.TRAINER_WAITING) == {(): 1}
    reports = [StepSummary(0, 2.5, 0.4, 100, 3, 1.0), StepSummary(1, 2.25, 0.0, 70, 2, 1.0)]
    for report in reports:
        meter.step(report)
    told = list(meter.readings())
    assert not figures(told, table.TRAINER_WAITING)
    assert figures(told, table.TRAINER_STEP) == {(): 1}
    assert figures(told, table.TRAINER_LOSS) == {(): 2.25}
    assert figures(told, table.TRAINER_PEERS) == {(): 2}
    assert figures(told, table.TRAINER_STEP_SECONDS) == {(): 1}, "the second step's time is not known"
    assert figures(told, table.TRAINER_TOKENS) == {(): 170}
    assert listener.heard == [run, ("for a holder", (2, 3)), *reports]


@in_virtual_time
async def test_a_training_stage_counts_each_microbatch_there_and_back(tmp_path: Path) -> None:
    batches = toy_batches()
    run = toy_run(batches, 3)
    async with TrainingSwarm(tmp_path) as swarm:
        first = await swarm.join(0, 2)
        last = await swarm.join(2, 3)
        _, trainer = await swarm.trainer(run, batches, lambda _report: None)
        assert await asyncio.wait_for(trainer.train(asyncio.Event()), PATIENCE_S) == run.steps
        for volunteer, span in ((first, "0:2"), (last, "2:3")):
            told = list(volunteer.stage.meter.readings())
            passes = run.steps * run.microbatches
            assert figures(told, table.MICROBATCHES) == {(span, FORWARD): passes, (span, BACKWARD): passes}
            assert figures(told, table.AVERAGING_SECONDS) == {(span,): run.steps}
            assert not figures(told, table.NOT_FINITE) and not figures(told, table.FAULTS)
        sent = figures(first.stage.meter.readings(), table.TENSOR_RAW_BYTES)
        assert sent["0:2", TRAIN, "none", FORWARD] > 0
