"""What passes ask of a card, counted on a simulated one: `python -m tests.card.counts` prints a table."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.serving.captured_decode import STEADY_STEPS
from swarmnode.compute.serving.device_transfers import USES, DeviceOutputs
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.serving.runner import RunnerConfig, StageRunner, StepInput
from swarmnode.compute.serving.sampler import Sampler
from tests.card.conftest import LAYERS
from tests.card.simulated import Counts, SimulatedCards, load
from tests.card.test_on_captured_decode import Dictated
from tests.card.test_on_waiting import HOPS, SAMPLED, Hop, training_waits
from tests.llama import save_llama

CARD = torch.device("cuda", 1)
VOCABULARY = 128_256
LAUNCHES = (38, 47)  # before anything was done about them
LINK_LAUNCHES = {1: (9, 15, 17), 8: (10, 17, 18), 32: (10, 17, 18)}  # by sessions
DRAW_BYTES = 12_308  # 1025 logits with their ids, and the logarithm of the sum


class Row(NamedTuple):
    """What was counted, and how much of it there may be; `said` is that in words."""

    what: str
    counted: tuple[int, ...]
    floor: tuple[int, ...]
    said: str = ""

    def __str__(self) -> str:
        cells = (self.what, _joined(self.counted), self.said or _joined(self.floor))
        return f"| {' | '.join(cells)} |"


def _joined(numbers: tuple[int, ...]) -> str:
    return " · ".join(f"{number:,}" for number in numbers)


async def decode_waits(cards: SimulatedCards, checkpoint: Checkpoint, span: tuple[int, int], sessions: int) -> int:
    """Of a pass in the midst of a text."""
    hop = Hop(span, checkpoint, CARD, sessions)
    await hop.worker.start()
    for _ in range(3):
        before = cards.counts(CARD.index).waits
        await hop.step()
    waits = cards.counts(CARD.index).waits - before
    await hop.worker.close()
    await hop.executor.close()
    return waits


async def decode_counts(cards: SimulatedCards, checkpoint: Checkpoint, span: tuple[int, int], sessions: int) -> Counts:
    """Of a captured pass between links, from payloads to payloads."""
    hop = Hop(span, checkpoint, CARD, sessions)
    assert hop.runner.captured is not None
    hop.runner.captured.stopwatch = Dictated(CARD, replay_s=1.0, ordinary_s=2.0)
    await hop.worker.start()
    for _ in range(max(STEADY_STEPS, USES) + 4):
        before = cards.counts(CARD.index)
        await hop.step()
    after = cards.counts(CARD.index)
    assert hop.runner.captured.replays > 0
    await hop.worker.close()
    await hop.executor.close()
    return Counts(*(now - then for now, then in zip(after, before, strict=True)))


def launches_of_a_layer(cards: SimulatedCards, checkpoint: Checkpoint, dtype: torch.dtype) -> int:
    """In a decode pass: of three layers, less those of two. Attention is one, as on a real card; here its parts are launched."""
    counted = []
    attend = functional.scaled_dot_product_attention
    in_parts = 0

    def watched(*tensors: Tensor, **options: Any) -> Tensor:
        nonlocal in_parts
        before = cards.counts(CARD.index).launches
        attended = attend(*tensors, **options)
        in_parts += cards.counts(CARD.index).launches - before - 1
        return attended

    functional.scaled_dot_product_attention = watched
    for layers in (LAYERS - 1, LAYERS):
        span = load_span(checkpoint, 1, 1 + layers, device=CARD, dtype=dtype)
        runner = StageRunner(span, RunnerConfig(1 << 22, capture=False))
        runner.open("session", rows=1, max_length=40)
        for _ in range(4):
            before, in_parts = cards.counts(CARD.index).launches, 0
            runner.run([StepInput("session", torch.zeros(1, 1, span.hidden_size, dtype=dtype))])
        counted.append(cards.counts(CARD.index).launches - before - in_parts)
    functional.scaled_dot_product_attention = attend
    return counted[1] - counted[0]


def sampled_bytes() -> int:
    """Of a row of logits, what comes down for a draw."""
    outputs = DeviceOutputs()
    generator = torch.Generator().manual_seed(2)
    logits_BKV = (6 * torch.randn(1, 1, VOCABULARY, generator=generator)).to(CARD)
    draw = Sampler(SAMPLED, 60).launch(logits_BKV, 5, outputs)
    fetched = outputs.fetch()
    draw(fetched)
    return sum(tensor.nbytes for tensor in fetched)


def rows(cards: SimulatedCards, checkpoint: Checkpoint) -> Iterator[Row]:
    """Of a checkpoint with at least three layers."""
    for sessions in (1, 8):
        waits = tuple(asyncio.run(decode_waits(cards, checkpoint, span, sessions)) for span in HOPS.values())
        yield Row(f"waits of a decode pass, first · middle · last hop, sessions: {sessions}", waits, (2, 2, 2))
    for sessions in (1, 8, 32):
        counted = [asyncio.run(decode_counts(cards, checkpoint, span, sessions)) for span in HOPS.values()]
        what = f"captured decode pass between links, first · middle · last hop, sessions: {sessions}"
        yield Row(f"launches of a {what}", tuple(each.launches for each in counted), LINK_LAUNCHES[sessions])
        copies = tuple(number for each in counted for number in (each.uploads, each.downloads))
        yield Row(f"copies up and down of a {what}", copies, (1,) * 6)
    for dtype, major in ((torch.float32, 6), (torch.float16, 7), (torch.bfloat16, 8)):
        cards.majors = [major, major]
        waits = training_waits(cards, CARD, checkpoint, autocast=True)
        name = str(dtype).removeprefix("torch.")
        yield Row(f"waits of a training microbatch at a middle stage, there · back, {name}", waits, (2, 2))
    launches = tuple(launches_of_a_layer(cards, checkpoint, dtype) for dtype in (torch.float32, torch.bfloat16))
    said = "one graph for all layers where captured"
    yield Row("launches of a Llama layer in decode, float32 · bfloat16", launches, LAUNCHES, said)
    what = f"bytes that come down for a draw from {VOCABULARY:,} logits"
    yield Row(what, (sampled_bytes(),), (DRAW_BYTES,), "12 KB")


def main() -> None:
    cards = load()
    with tempfile.TemporaryDirectory() as folder:
        save_llama(Path(folder), layers=LAYERS, vocab_size=99, hidden_size=32, intermediate_size=48)
        print("| counted | today | floor |\n|---|---|---|")
        for row in rows(cards, Checkpoint(folder)):
            print(row)


if __name__ == "__main__":
    main()
