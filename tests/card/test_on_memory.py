"""Memory of a card is free as soon as nobody needs it, whatever still refers to it, and whatever failed."""

from __future__ import annotations

import asyncio
import functools
import gc
from collections.abc import Iterator

import msgspec
import pytest
import torch

from swarmnode.compute.executor import Executor, Urgency, forget_traceback
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.serving.cache import MAX_PADDING
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.serving.runner import RunnerConfig, StageRunner, StepInput
from swarmnode.compute.training.learner import Learner
from swarmnode.compute.training.lm import load_segment
from swarmnode.ledger import Account, MemoryLedger
from swarmnode.swarm.records.run import Run
from swarmnode.training.worker.memory import TrainingMemory, segment_bytes
from swarmnode.training.worker.training_parts import estimates
from tests.card.conftest import LAYERS
from tests.card.simulated import SimulatedCards

UNITS = LAYERS + 2
CARD = 1
RUN = Run(data=bytes(32), steps=6, batch=4, microbatch=2, sequence=12)


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """Who waits for it holds two spans meanwhile."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def begin_serving(checkpoint: Checkpoint, device: torch.device) -> StageRunner:
    runner = StageRunner(load_span(checkpoint, 0, UNITS, device=device), RunnerConfig(1 << 20))
    runner.open("session", rows=1, max_length=20)
    runner.run([StepInput("session", torch.ones(1, 5, dtype=torch.int64))])
    return runner


def test_a_quarter_of_the_caches_is_padding_at_most(
    cards: SimulatedCards, card: torch.device, checkpoints: dict[str, Checkpoint]
) -> None:
    """Five sessions half as long as the sixth."""
    runner = StageRunner(load_span(checkpoints["llama"], 1, UNITS - 1, device=card), RunnerConfig(1 << 24))
    lengths = [300, *[150] * 5]
    before = cards.counts(CARD).used_bytes
    for session, length in enumerate(lengths):
        runner.open(session, rows=1, max_length=length + 2)
        runner.run([StepInput(session, torch.zeros(1, length, 32))])
    for _ in range(2):
        runner.run([StepInput(session, torch.zeros(1, 1, 32)) for session in range(len(lengths))])
    needed = sum(length + 2 for length in lengths) * runner.span.cache_bytes_per_token
    assert needed < cards.counts(CARD).used_bytes - before <= needed / (1 - MAX_PADDING)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_node_moves_without_room_for_two_spans(
    kind: str, cards: SimulatedCards, card: torch.device, checkpoints: dict[str, Checkpoint]
) -> None:
    before = cards.counts(CARD).used_bytes
    runner = begin_serving(checkpoints[kind], card)
    runner.close_all()
    cards.limit(CARD, before + int(1.2 * (cards.counts(CARD).peak_bytes - before)))
    spans = []
    for _ in range(20):
        runner = begin_serving(checkpoints[kind], card)
        spans.append(runner.span)  # somebody remembers it
        runner.close_all()
    assert cards.counts(CARD).used_bytes == before


@pytest.mark.parametrize("major", [6, 7, 8], ids=["float32", "float16", "bfloat16"])
def test_a_microbatch_that_fits_only_where_graphs_are_computed_again(
    major: int, cards: SimulatedCards, card: torch.device, checkpoints: dict[str, Checkpoint]
) -> None:
    """On a card with what the ledger counts, and no more, the ledger has the units computed again; their graphs would not fit."""
    cards.majors = [major, major]
    run = msgspec.structs.replace(RUN, batch=240, microbatch=240, sequence=8, autocast=True)
    segment = load_segment(checkpoints["llama"], 1, UNITS - 1, device=card)
    hidden_BTH = torch.randn(240, 8, 32, generator=torch.Generator().manual_seed(0))

    def train(learner: Learner) -> torch.Tensor:
        values = (hidden_BTH.to(card),)
        (output_BTH,) = learner.forward(0, 0, 1, UNITS - 1, values)
        learner.backward(0, (output_BTH,))
        return learner.gradient(learner.blocks).copy().cpu()

    ledger = MemoryLedger(4 * segment_bytes(segment) + 24_000_000)
    memory = TrainingMemory(ledger, segment, functools.partial(estimates, checkpoints["llama"]))
    assert memory.begin(run), "as many graphs as are in flight at once do not fit"
    room_bytes = ledger.accounts()[Account.ACTIVATIONS]
    learner = Learner(segment, run)
    wanted = train(learner)
    learner.discard()
    cards.limit(CARD, cards.counts(CARD).used_bytes + room_bytes)
    with pytest.raises(torch.OutOfMemoryError):
        train(learner)
    cards.limit(CARD, 1 << 62)
    learner = Learner(segment, run, recompute=True)
    cards.limit(CARD, cards.counts(CARD).used_bytes + room_bytes)
    torch.testing.assert_close(train(learner), wanted)


async def test_a_microbatch_that_found_no_memory_leaves_none_taken(
    cards: SimulatedCards, card: torch.device, checkpoints: dict[str, Checkpoint]
) -> None:
    learner = Learner(load_segment(checkpoints["llama"], 0, UNITS, device=card), RUN)
    ids_BT = torch.ones((2, 12), dtype=torch.int64, device=card)
    executor = Executor()

    async def once(lease: int) -> None:
        forward = executor.call(
            Urgency.FORWARD, lambda: learner.forward(lease, 0, 0, UNITS, (ids_BT,), (ids_BT,)), kind="try"
        )
        await forward
        del forward
        await executor.call(Urgency.BACKWARD, lambda: learner.backward(lease, ()), kind="try")

    await once(0)
    learner.discard()
    used: list[int] = []
    errors: list[Exception] = []
    for room in (20_000, 60_000, 100_000, 140_000):
        idle = cards.counts(CARD).used_bytes
        cards.limit(CARD, idle + room)
        try:
            await once(room)
        except torch.OutOfMemoryError as error:
            errors.append(error)  # somebody remembers it
        cards.limit(CARD, 1 << 62)
        learner.drop(room)
        used.append(cards.counts(CARD).used_bytes)
    assert len(errors) == 4 and len(set(used)) == 1, used
    await once(1)
    await executor.close()
    await asyncio.sleep(0)


@pytest.mark.parametrize("device", [0, 1])
def test_a_pass_that_finds_no_memory_fails_alone_and_again(
    device: int, cards: SimulatedCards, checkpoints: dict[str, Checkpoint]
) -> None:
    """Twice on each card: nothing of it stays, and the sessions beside it go on where they were."""
    span = load_span(checkpoints["llama"], 0, UNITS, device=torch.device("cuda", device))
    runner = StageRunner(span, RunnerConfig(1 << 24, capture=False))
    for session in ("small", "large"):
        runner.open(session, rows=1, max_length=600)
    ids_BT = torch.ones(1, 500, dtype=torch.int64)

    def step() -> torch.Tensor:
        (result,) = runner.run([StepInput("small", ids_BT[:, :1])])
        runner.truncate("small", runner.length("small") - 1)
        return result.output.cpu()

    runner.run([StepInput("small", ids_BT[:, :5])])
    wanted = step()
    used: set[int] = set()
    for _ in range(2):
        cards.limit(device, cards.counts(device).used_bytes + 100_000)
        (outcome,) = runner.run_each([StepInput("large", ids_BT)])
        assert isinstance(outcome, torch.OutOfMemoryError)
        forget_traceback(outcome)
        del outcome
        used.add(cards.counts(device).used_bytes)
        assert torch.equal(step(), wanted)
    cards.limit(device, 1 << 62)
    assert len(used) == 1 and runner.length("large") == 0
    (outcome,) = runner.run_each([StepInput("large", ids_BT)])
    assert not isinstance(outcome, Exception)
