"""Quantised spans on a card: sessions get what they get alone, wherever their rows lie, and a span that goes leaves nothing.

NF4 is multiplied by kernels of bitsandbytes for CUDA, which a simulated card cannot run: there int8 alone is tried, whose products
are torch's own.
"""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.span import ModelSpan
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.serving.runner import RunnerConfig, StageRunner, StepInput
from tests.card.conftest import LAYERS
from tests.card.simulated import LOADED

UNITS = LAYERS + 2
CPU = torch.device("cpu")
LENGTH = 12  # of a text
PROMPTS = {"a": (7, 3, 60), "b": (5, 11, 2, 31, 8, 90, 17), "c": (40,)}
# Of logits of this model, whose deviation is 0.1. One row and several may go through unlike kernels, in float32.
CLOSE = {"atol": 1e-4, "rtol": 1e-3}


@pytest.fixture(params=["int8", "nf4"])
def method(request: pytest.FixtureRequest) -> str:
    if request.param == "nf4":
        if LOADED:
            pytest.skip("bitsandbytes has NF4 on cards by kernels for CUDA, which a simulated one cannot run")
        pytest.importorskip("bitsandbytes", reason="NF4 is by bitsandbytes, which is not installed here")
    return str(request.param)


@pytest.fixture
def span(method: str, card: torch.device, checkpoints: dict[str, Checkpoint]) -> ModelSpan:
    return load_span(checkpoints["llama"], 0, UNITS, device=card, quantize=method)


class Text:
    """One that a session writes, by the likeliest token each time."""

    def __init__(self, session: str) -> None:
        self.session = session
        self.ids = list(PROMPTS[session])
        self.logits: list[Tensor] = []

    def work(self, held: int) -> StepInput:
        """The positions that are not held yet."""
        return StepInput(self.session, torch.tensor([self.ids[held:]]))

    def take(self, logits_BKV: Tensor) -> None:
        """Of the newest position."""
        self.logits.append(logits_BKV[0, -1].cpu())
        self.ids.append(int(self.logits[-1].argmax()))


def write(runner: StageRunner, *texts: Text, steps: int) -> None:
    """So many tokens of each, all in the same passes. Who is not known yet is opened, and read from its beginning."""
    for text in texts:
        if text.session not in runner:
            runner.open(text.session, rows=1, max_length=40)
    for _ in range(steps):
        results = runner.run([text.work(runner.length(text.session)) for text in texts])
        for text, result in zip(texts, results, strict=True):
            text.take(result.output)


def alone(span: ModelSpan, session: str, *, steps: int = LENGTH) -> Text:
    """What a session writes with nobody beside it."""
    text = Text(session)
    write(StageRunner(span, RunnerConfig(1 << 22)), text, steps=steps)
    return text


def assert_same(text: Text, wanted: Text) -> None:
    assert text.ids == wanted.ids
    torch.testing.assert_close(torch.stack(text.logits), torch.stack(wanted.logits), **CLOSE)


def test_a_text_is_the_same_alone_and_in_a_batch_that_changes(span: ModelSpan) -> None:
    """Rows are regrouped where somebody comes, stays away, or goes."""
    runner = StageRunner(span, RunnerConfig(1 << 22))
    a, b, c = map(Text, PROMPTS)
    write(runner, a, steps=3)
    write(runner, a, b, steps=3)
    write(runner, a, b, c, steps=2)
    write(runner, b, c, steps=4)
    runner.close("c")
    write(runner, a, b, steps=2)
    write(runner, b, steps=1)
    assert [len(text.logits) for text in (a, b, c)] == [10, 12, 6]
    for text in (a, b, c):
        assert_same(text, alone(span, text.session, steps=len(text.logits)))


def test_rows_of_a_session_are_permuted(span: ModelSpan) -> None:
    """Two padded rows change places, and back again."""
    ids_BT = torch.randint(0, 99, (2, 6), generator=torch.Generator().manual_seed(0))

    def last(*orders: tuple[int, ...]) -> Tensor:
        runner = StageRunner(span, RunnerConfig(1 << 22))
        runner.open("rows", rows=2, max_length=20, padding=(0, 3))
        runner.run([StepInput("rows", ids_BT)])
        for order in orders:
            (result,) = runner.run([StepInput("rows", torch.tensor([[8], [8]]), reorder=order)])
        return result.output.cpu()

    torch.testing.assert_close(last((1, 0)), last(()).flip(0), **CLOSE)
    torch.testing.assert_close(last((1, 0), (1, 0)), last((), ()), **CLOSE)


def test_a_session_moves_to_another_span(span: ModelSpan, method: str, checkpoints: dict[str, Checkpoint]) -> None:
    """Another node reads what was written so far as one prompt, and goes on as the first would have: on whichever card it is."""
    text = Text("b")
    write(StageRunner(span, RunnerConfig(1 << 22)), text, steps=LENGTH // 2)
    wanted = alone(span, "b")
    span.close()
    first = torch.device("cuda", 0)
    other = load_span(checkpoints["llama"], 0, UNITS, device=first, quantize=method)
    write(StageRunner(other, RunnerConfig(1 << 22)), text, steps=LENGTH - LENGTH // 2)
    assert_same(text, wanted)


@pytest.mark.parametrize("cut", [1, 3])
def test_a_model_in_two_spans_is_the_model(
    cut: int, span: ModelSpan, method: str, card: torch.device, checkpoints: dict[str, Checkpoint]
) -> None:
    """Each is quantised by itself: what a matrix becomes is not its neighbours' affair."""
    ids_BT = torch.tensor([PROMPTS["b"]])
    x = ids_BT
    for start, end in ((0, cut), (cut, UNITS)):
        part = load_span(checkpoints["llama"], start, end, device=card, quantize=method)
        runner = StageRunner(part, RunnerConfig(1 << 22))
        runner.open("part", rows=1, max_length=20)
        (result,) = runner.run([StepInput("part", x)])
        x = result.output
    runner = StageRunner(span, RunnerConfig(1 << 22))
    runner.open("whole", rows=1, max_length=20)
    (whole,) = runner.run([StepInput("whole", ids_BT)])
    torch.testing.assert_close(x.cpu(), whole.output.cpu(), **CLOSE)


def test_int8_is_the_cpus(card: torch.device, checkpoints: dict[str, Checkpoint]) -> None:
    """To the bit as it is stored, and but for the order of sums as it multiplies."""
    near, far = (load_span(checkpoints["llama"], 0, UNITS, device=device, quantize="int8") for device in (CPU, card))
    stored = dict(near.model.named_buffers())
    for name, buffer in far.model.named_buffers():
        assert torch.equal(buffer.cpu(), stored[name]) or not name.endswith(("weight", "scale_O1"))
    assert_same(alone(far, "b"), alone(near, "b"))


def test_a_span_that_is_loaded_again_leaves_nothing(
    method: str, card: torch.device, checkpoints: dict[str, Checkpoint]
) -> None:
    """Five times, and no collector comes by: also what quantised matrices keep beside their weights is given back."""
    gc.collect()
    gc.disable()
    try:
        used: list[int] = []
        spans: list[ModelSpan] = []
        for _ in range(5):
            runner = StageRunner(
                load_span(checkpoints["llama"], 0, UNITS, device=card, quantize=method), RunnerConfig(1 << 22)
            )
            write(runner, Text("a"), steps=2)
            held = torch.cuda.memory_allocated(card)
            spans.append(runner.span)  # somebody remembers it
            quantization = runner.span.quantization
            assert quantization is not None
            runner.close_all()
            used.append(torch.cuda.memory_allocated(card))
            assert held - used[-1] >= quantization.bytes_after
    finally:
        gc.enable()
    assert len(set(used[1:])) == 1, "the first may leave workspaces of the device's libraries"
