"""What passes ask of a card, counted on a simulated one: `python -m tests.card.counts` prints a table."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.span import load_span
from swarmnode.compute.serving.device_outputs import DeviceOutputs
from swarmnode.compute.serving.runner import RunnerConfig, StageRunner, StepInput
from swarmnode.compute.serving.sampler import Sampler
from tests.card.conftest import LAYERS
from tests.card.simulated import SimulatedCards, load
from tests.card.test_on_waiting import HOPS, SAMPLED, Hop, training_waits
from tests.llama import save_llama

CARD = torch.device("cuda", 1)
VOCABULARY = 128_256


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


def rows(cards: SimulatedCards, checkpoint: Checkpoint) -> Iterator[tuple[str, str, str]]:
    """(what, counted, floor)"""
    for sessions in (1, 8):
        waits = [asyncio.run(decode_waits(cards, checkpoint, span, sessions)) for span in HOPS.values()]
        what = f"waits of a decode pass, first · middle · last hop, sessions: {sessions}"
        yield what, " · ".join(map(str, waits)), "2 · 2 · 2"
    for dtype, major in ((torch.float32, 6), (torch.float16, 7), (torch.bfloat16, 8)):
        cards.majors = [major, major]
        there, back = training_waits(cards, CARD, checkpoint, autocast=True)
        what = f"waits of a training microbatch at a middle stage, there · back, {str(dtype).removeprefix('torch.')}"
        yield what, f"{there} · {back}", "2 · 2"
    layers = [launches_of_a_layer(cards, checkpoint, dtype) for dtype in (torch.float32, torch.bfloat16)]
    launches = " · ".join(map(str, layers))
    yield "launches of a Llama layer in decode, float32 · bfloat16", launches, "one graph for all layers where captured"
    yield f"bytes that come down for a draw from {VOCABULARY:,} logits", f"{sampled_bytes():,}", "12 KB"


def main() -> None:
    cards = load()
    with tempfile.TemporaryDirectory() as folder:
        save_llama(Path(folder), layers=LAYERS, vocab_size=99, hidden_size=32, intermediate_size=48)
        print("| counted | today | floor |\n|---|---|---|")
        for row in rows(cards, Checkpoint(folder)):
            print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
