"""Passes of packed models as one graph of ggml: torch's numbers, equal bits in any company, and never a dead node."""

from __future__ import annotations

import faulthandler
import gc
import os
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import gguf
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from swarmnode.compute.gguf.repack import ROUTERS
from swarmnode.compute.model.adapters.span_adapters import Lora
from swarmnode.compute.model.attention import attend_by_position
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.span import ModelSpan
from swarmnode.compute.packing.ggml import FORMATS, library
from swarmnode.compute.packing.ggml_graph import CannotBeLowered
from swarmnode.compute.packing.ggml_matrix import GgmlMatrix, threads
from swarmnode.compute.packing.packed_weight import PackedWeight, hold
from swarmnode.compute.serving.cohort import Window, sliding_layers
from swarmnode.compute.serving.graphs import graph_passes
from swarmnode.compute.serving.graphs.graph_passes import GRAPHS, SpanGraphs, SpareCores
from swarmnode.compute.serving.graphs.operations import OpenSize
from swarmnode.compute.serving.graphs.span_graph import SpanGraph
from swarmnode.compute.serving.graphs.span_trace import trace_span
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.serving.runner import (
    WANT_ALL,
    WANT_LAST,
    WANT_NOTHING,
    RunnerConfig,
    StageRunner,
    StepInput,
)
from swarmnode.ledger import Account, MemoryLedger
from swarmnode.metrics.machine import running_threads
from swarmnode.serving.span_part import find_bits
from tests.compute.model.llama_gguf import save_llama_gguf
from tests.compute.packing.test_packed_weight import pack
from tests.numerics.families import tiny_config

pytestmark = pytest.mark.skipif(
    library() is None, reason="the package xllamacpp is not installed, or not for this machine"
)
ROUNDED = 0.1  # of the logits' spread: activations have 8 bits
SAME = 1e-4  # of the logits' spread: exact products round as float32 does
LENGTH = 40


def llama_span(
    folder: Path, form: str = "Q4_0", dtype: torch.dtype = torch.float32, products: str = "fast"
) -> ModelSpan:
    save_llama_gguf(folder / "tiny.gguf", form=form)
    checkpoint = pack(folder / "tiny.gguf", folder / "packed")
    return load_span(checkpoint, 0, checkpoint.units, dtype=dtype, products=products, check=False)


def family_span(model_type: str, folder: Path, *, exact: bool = False) -> ModelSpan:
    """Return a tiny model of a family whose matrices are packed in Q8_0 where their rows have whole blocks."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type), dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(folder)
    checkpoint = Checkpoint(folder)
    plain = load_span(checkpoint, 0, checkpoint.units, dtype=torch.float32, check=False)
    packed: dict[str, Any] = {}
    for name, module in plain.model.named_modules():
        weight = getattr(module, "weight", None)
        is_kept = "embed" in name or name.rpartition(".")[2] in ROUTERS
        if isinstance(weight, Tensor) and weight.ndim == 2 and weight.shape[1] % 32 == 0 and not is_kept:
            rows = gguf.quantize(weight.detach().numpy(), gguf.GGMLQuantizationType.Q8_0)
            matrix = GgmlMatrix(torch.from_numpy(rows), FORMATS["Q8_0"], weight.shape[1], exact=exact)
            packed[f"{name}.weight"] = PackedWeight([matrix], torch.float32)
    hold(plain.model, packed)
    if not exact:
        attend_by_position(plain.model)
    return ModelSpan(checkpoint.family, plain.model, 0, checkpoint.units)


def open_runner(span: ModelSpan, ledger: MemoryLedger | None = None) -> StageRunner:
    windows = {layer: Window(size, slack=8, room=16) for layer, size in sliding_layers(span.config).items()}
    return StageRunner(span, RunnerConfig(1 << 26, windows=windows, prefill_positions=16), ledger=ledger)


def graphs_of(runner: StageRunner) -> SpanGraphs:
    assert runner.graphs is not None
    return runner.graphs


def some_ids(span: ModelSpan, length: int = LENGTH, seed: int = 1) -> Tensor:
    return torch.randint(3, span.vocab_size, (1, length), generator=torch.Generator().manual_seed(seed))


def logits(runner: StageRunner, ids_BT: Tensor, cuts: list[int], name: str = "a") -> Tensor:
    """Return all logits of a session whose text comes in parts that end at these places."""
    runner.open(name, rows=len(ids_BT), max_length=ids_BT.shape[1] + 8)
    parts = [ids_BT[:, first:end] for first, end in zip([0, *cuts], [*cuts, ids_BT.shape[1]], strict=True)]
    results = [runner.run([StepInput(name, part, WANT_ALL)])[0].output for part in parts]
    runner.close(name)
    return torch.cat(results, dim=1)


# Rotary halves; windows that move; biases; norms of heads; part of the width rotated; other norms and activations; a table of
# positions; what torch computes between graphs: comparisons, and views that go through memory in steps; caps of scores, and sinks.
@pytest.mark.parametrize(
    "model_type",
    [
        "llama",
        "gemma3_text",
        "qwen2",
        "qwen3",
        "phi",
        "olmo2",
        "starcoder2",
        "gptj",
        "apertus",
        "cohere",
        "gemma2",
        "granite_swa",
        "granitemoe",
    ],
)
def test_a_familys_graph_is_torchs_way_with_equal_bits_at_any_cut(model_type: str, tmp_path: Path) -> None:
    span = family_span(model_type, tmp_path)
    ids_BT = some_ids(span)
    runner = open_runner(span)
    whole = logits(runner, ids_BT, [])
    assert graphs_of(runner).passes > 0, graphs_of(runner).refusals
    for cuts in (list(range(20, LENGTH)), [3, 9, 10, 31]):
        assert torch.equal(logits(runner, ids_BT, cuts), whole)
    runner.open("last", rows=2, max_length=60)
    (result,) = runner.run([StepInput("last", torch.cat([ids_BT.flip(1), ids_BT]))])
    assert torch.equal(result.output[1:], whole[:, -1:]), "positions without logits are left out early"
    by_torch = open_runner(span)
    by_torch.graphs = None
    wanted = logits(by_torch, ids_BT, [])
    assert float((whole - wanted).abs().mean() / wanted.std()) < ROUNDED


def decoded(runner: StageRunner, texts: list[Tensor], names: list[int]) -> list[Tensor]:
    """Return the logits of sessions that begin with 20 positions, each alone, and go on together, one position a pass."""
    for name in names:
        runner.open(name, rows=1, max_length=LENGTH + 8)
        runner.run([StepInput(name, texts[name][:, :20])])
    steps = [runner.run([StepInput(name, texts[name][:, at : at + 1]) for name in names]) for at in range(20, LENGTH)]
    for name in names:
        runner.close(name)
    return [torch.cat([step[place].output for step in steps], 1) for place in range(len(names))]


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_1", "IQ4_NL", "gemma3_text", "phi", "olmo2"])
def test_exact_steps_are_graphs_with_float32_numbers_and_equal_bits_in_company(kind: str, tmp_path: Path) -> None:
    is_form = kind in FORMATS
    span = llama_span(tmp_path, kind, products="exact") if is_form else family_span(kind, tmp_path, exact=True)
    texts = [some_ids(span, seed=seed) for seed in range(3)]
    runner = open_runner(span)
    alone = [decoded(runner, texts, [name])[0] for name in range(3)]
    assert graphs_of(runner).passes >= 3 * (LENGTH - 20), graphs_of(runner).refusals
    together = decoded(runner, texts, [0, 1, 2])
    assert all(torch.equal(one, other) for one, other in zip(together, alone, strict=True))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        graphs_of(runner)._spare_cores = cast(SpareCores, SimpleNamespace(count=lambda: 2))
        for name in range(3):
            assert torch.equal(decoded(runner, texts, [name])[0], alone[name])
    finally:
        torch.set_num_threads(before)
    by_torch = open_runner(span)
    by_torch.graphs = None
    for wanted, got in zip(decoded(by_torch, texts, [0, 1, 2]), alone, strict=True):
        assert float((got - wanted).abs().max() / wanted.std()) < SAME


def test_behind_the_last_attention_a_graph_has_positions_with_logits_only(tmp_path: Path) -> None:
    span = llama_span(tmp_path)
    operations = trace_span(span, 0, span.end, {}).operations
    last = max(at for at, operation in enumerate(operations) if operation.name == "attention")
    products = [operation for operation in operations[last:] if operation.name == "product"]
    assert products and all(operation.shape[0] == OpenSize("BK") for operation in products)


def test_a_prompt_needs_no_trial_beside_others_that_decode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All kinds of passes over the whole span have been tried when the first session comes."""
    span = llama_span(tmp_path)
    runner = open_runner(span)
    graphs_of(runner).prepare()
    monkeypatch.setattr(graph_passes, "trace_span", lambda *_: pytest.fail("something is recorded late"))
    x, texts = some_ids(span, seed=0), []
    for name, wants in enumerate(((WANT_ALL,), (WANT_NOTHING, WANT_ALL), (WANT_NOTHING, WANT_LAST))):
        runner.open(name, rows=1, max_length=LENGTH)
        parts = (x,) if len(wants) == 1 else (x[:, :3], x[:, 3:])
        outputs = [runner.run([StepInput(name, *each)])[0].output for each in zip(parts, wants, strict=True)]
        assert len(outputs) == 1 or outputs[0].shape[1] == 0
        texts.append(outputs[-1][:, -1])
    assert graphs_of(runner).passes >= 5 and all(torch.equal(text, texts[0]) for text in texts)


class Activation(torch.nn.Module):
    """Activation function that ggml does not know."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        recorder = threads().recorder
        if self.kind == "whole" and recorder is not None:
            return cast(Tensor, recorder.by_torch("squares", lambda _cohort, x: x * x, [x], x))
        if self.kind in ("whole", "square"):
            return x * x
        if self.kind == "chosen":  # whole numbers and truth values stay with torch
            return x.gather(-1, x.abs().topk(3, -1).indices).sum(-1, keepdim=True) * (x > 0.1)
        return x.cumsum(1)


@pytest.mark.parametrize("kind", ["whole", "chosen", "mixed"])
def test_what_ggml_cannot_compute_splits_the_graph_with_equal_bits(kind: str, tmp_path: Path) -> None:
    span = llama_span(tmp_path)
    ids_BT = some_ids(span)
    for layer in list(span.stack.children())[1:]:
        layer.mlp.act_fn = Activation(kind)  # type: ignore[union-attr, assignment]
    runner = open_runner(span)
    whole = logits(runner, ids_BT, [])
    if kind == "mixed":
        assert graphs_of(runner).passes == 0 and "depends on other ones" in str(graphs_of(runner).refusals)
        return
    assert graphs_of(runner).passes, graphs_of(runner).refusals
    for cuts in (list(range(20, LENGTH)), [3, 9, 10, 31]):
        assert torch.equal(logits(runner, ids_BT, cuts), whole)
    runner.open("two", rows=2, max_length=60)
    (result,) = runner.run([StepInput("two", torch.cat([ids_BT.flip(1), ids_BT]), WANT_ALL)])
    assert torch.equal(result.output[1:], whole)
    if kind == "whole":
        for layer in list(span.stack.children())[1:]:
            layer.mlp.act_fn = Activation("square")  # type: ignore[union-attr, assignment]
    by_torch = open_runner(span)
    by_torch.graphs = None
    wanted = logits(by_torch, ids_BT, [])
    assert float((whole - wanted).abs().mean() / wanted.std()) < ROUNDED


@pytest.mark.parametrize(
    ("form", "dtype"), [("Q4_0", torch.float32), ("Q4_1", torch.bfloat16), ("BF16", torch.float32)]
)
def test_company_padding_guesses_and_ranges_change_no_bits(form: str, dtype: torch.dtype, tmp_path: Path) -> None:
    span = llama_span(tmp_path, form, dtype)
    texts = [some_ids(span, LENGTH + 7 * at, seed=at) for at in range(3)]
    alone = [logits(open_runner(span), ids_BT, [LENGTH // 2]) for ids_BT in texts]
    runner = open_runner(span)
    for at in range(len(texts)):
        runner.open(at, rows=1, max_length=100)
    got: list[list[Tensor]] = [[], [], []]
    done = [0, 0, 0]
    turn = 0
    while any(done[at] < ids_BT.shape[1] for at, ids_BT in enumerate(texts)):
        works = []
        for at, ids_BT in enumerate(texts):
            count = 5 + at if not done[at] else 1 + (turn + at) % 4
            if done[at] < ids_BT.shape[1] and (turn + at) % 5:
                works.append(StepInput(at, ids_BT[:, done[at] : done[at] + count], WANT_ALL))
        for result in runner.run(works):
            at = int(str(result.session_id))
            got[at].append(result.output)
            done[at] += result.output.shape[1]
        turn += 1
    assert all(torch.equal(torch.cat(parts, 1), wanted) for parts, wanted in zip(got, alone, strict=True))
    padded = torch.cat([torch.zeros(1, 7, dtype=torch.int64), texts[0]], dim=1)
    runner.open("padded", rows=2, max_length=100, padding=(7, 0))
    (result,) = runner.run([StepInput("padded", torch.cat([padded, texts[1]]), WANT_ALL)])
    assert torch.equal(result.output[:1, 7:], alone[0]) and torch.equal(result.output[1:], alone[1])
    assert graphs_of(runner).passes and not graphs_of(runner).refusals
    x = texts[0]
    for start, end in ((0, 2), (2, span.end)):  # a session that uses a part of the span
        runner.open(f"from {start}", rows=1, max_length=100, start=start, end=end)
        x = runner.run([StepInput(f"from {start}", x, WANT_ALL)])[0].output
    assert torch.equal(x, alone[0]), "two parts are the whole"


def test_a_session_beside_one_with_an_adapter_has_the_same_bits(tmp_path: Path) -> None:
    span = llama_span(tmp_path)
    ids_BT = some_ids(span)
    alone = logits(open_runner(span), ids_BT, [LENGTH // 2])
    random = torch.Generator().manual_seed(2)
    a_RI, b_OR = (torch.randn(shape, generator=random) for shape in ((4, span.hidden_size), (span.hidden_size, 4)))
    span.adapters.add("verse", {"model.layers.0.self_attn.q_proj": Lora(a_RI, b_OR)})
    runner = open_runner(span)
    assert find_bits(runner)
    for adapter in ("", "verse"):
        runner.open(adapter, rows=1, max_length=100, adapter=adapter)
    got: dict[Any, list[Tensor]] = {"": [], "verse": []}
    for first, end in ((0, 15), *((at, at + 1) for at in range(15, LENGTH))):
        for result in runner.run([StepInput(name, ids_BT[:, first:end], WANT_ALL) for name in got]):
            got[result.session_id].append(result.output)
    assert torch.equal(torch.cat(got[""], 1), alone)
    assert not torch.allclose(torch.cat(got["verse"], 1), alone, atol=0.1), "the adapter changes its own session"
    assert runner.has_equal_bits("") and not runner.has_equal_bits("verse")


def test_a_pass_without_logits_only_fills_the_caches(tmp_path: Path) -> None:
    span = llama_span(tmp_path)
    ids_BT = some_ids(span)
    runner = open_runner(span)
    runner.open("a", rows=1, max_length=100)
    (result,) = runner.run([StepInput("a", ids_BT[:, :12], WANT_NOTHING)])
    assert result.output.shape == (1, 0, span.vocab_size)
    (result,) = runner.run([StepInput("a", ids_BT[:, 12:], WANT_ALL)])
    assert torch.equal(result.output, logits(runner, ids_BT, [], "b")[:, 12:])
    assert not graphs_of(runner).refusals


def test_graphs_are_few_in_the_ledger_and_hold_no_buffers(tmp_path: Path) -> None:
    ledger = MemoryLedger()
    runner = open_runner(llama_span(tmp_path), ledger)
    for count in range(1, GRAPHS + 5):
        runner.open("a", rows=1, max_length=100)
        runner.run([StepInput("a", torch.ones(1, 1 + count % 16, dtype=torch.int64))])
        held = [weakref.ref(buffer) for buffers in runner.pool.cohorts[0].buffers.values() for buffer in buffers]
        runner.close("a")
    gc.collect()
    assert not any(buffer() is not None for buffer in held)
    assert 0 < len(graphs_of(runner)._graphs) <= GRAPHS
    assert ledger.accounts()[Account.ACTIVATIONS] > 0
    runner.close_all()
    assert ledger.used_bytes == 0


def test_no_memory_for_a_graph_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    span = llama_span(tmp_path)
    runner = open_runner(span, MemoryLedger(1 << 22))
    runner.open("a", rows=1, max_length=8)
    graphs_of(runner)._ledger = MemoryLedger(1)
    (result,) = runner.run([StepInput("a", some_ids(span, 3))])
    assert bool(result.output.isfinite().all()) and graphs_of(runner).passes == 0
    assert "is computed layer by layer" in caplog.text


def test_a_graph_of_a_size_that_ggml_cannot_have_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    span = llama_span(tmp_path)
    runner = open_runner(span)
    graphs_of(runner).prepare()

    def refuse(*_: Any) -> Any:
        raise CannotBeLowered("there is no memory for its values")

    monkeypatch.setattr(graph_passes, "SpanGraph", refuse)
    runner.open("a", rows=1, max_length=8)
    (result,) = runner.run([StepInput("a", some_ids(span, 3))])
    assert bool(result.output.isfinite().all()) and graphs_of(runner).passes == 0
    assert "is computed layer by layer: there is no memory for its values" in caplog.text


def test_threads_are_as_many_as_other_programs_leave_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    now = [0.0, 0.0, 0.0]
    cores = SpareCores(lambda: (now[0], now[1], now[2]), lambda: 9)
    found = []
    for others, own in ((0.0, 4.0), (1.1, 2.0), (0.2, 3.0), (3.9, 0.1), (9.0, 0.0)):
        now[0] += 2
        now[1] += 2 * (others + own)
        now[2] += 2 * own
        found.append(cores.count())
    assert found == [4, 3, 4, 1, 1]
    now[0] += 0.5
    assert cores.count() == 1, "it is not asked at each pass"


@pytest.mark.parametrize("pause_s", [2, 60])
def test_programs_that_ended_in_a_pause_take_no_cores(monkeypatch: pytest.MonkeyPatch, pause_s: int) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    now, running = [0.0, 0.0, 0.0], [1]
    cores = SpareCores(lambda: (now[0], now[1], now[2]), lambda: running[0])
    found = []
    for running[0] in (1, 3, 9):
        now[0] += pause_s
        now[1] += 3 * pause_s
        found.append(cores.count())
    assert found == [4, 2, 1]
    assert 1 <= (running_threads() or 1) < 1 << 20


def test_a_pass_takes_as_many_threads_as_are_spare_with_the_same_bits(tmp_path: Path) -> None:
    span = llama_span(tmp_path)
    ids_BT = some_ids(span)
    runner, before = open_runner(span), torch.get_num_threads()
    alone = logits(runner, ids_BT, [])
    try:
        torch.set_num_threads(3)
        for spare in (1, 2, 5):
            graphs_of(runner)._spare_cores = cast(SpareCores, SimpleNamespace(count=lambda spare=spare: spare))
            assert torch.equal(logits(runner, ids_BT, [20, 21]), alone)
            assert threads()._threads == min(spare, 3), "a node asks while it runs"
    finally:
        torch.set_num_threads(before)


def crash(*_: Any, **__: Any) -> Any:
    os.abort()


def spin(*_: Any, **__: Any) -> Any:
    while True:
        pass


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (crash, "SIGABRT"),
        (spin, "SIGXCPU|SIGKILL"),
        (lambda graph, _cohort, x, *_, **__: torch.full((len(x), x.shape[1], 7), torch.nan), "bits|numbers|failed"),
    ],
)
def test_what_crashes_hangs_or_is_wrong_is_seen_in_a_trial(
    harm: Callable[..., Any], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    span = llama_span(tmp_path)
    monkeypatch.setattr(SpanGraph, "run", harm)
    monkeypatch.setattr(graph_passes, "TRIAL_CPU_S", 1)
    runner = open_runner(span)
    runner.open("a", rows=1, max_length=8)
    with (tmp_path / "crashes").open("w") as crashes:
        faulthandler.enable(crashes)
        try:
            (result,) = runner.run([StepInput("a", some_ids(span, 3))])
        finally:
            faulthandler.enable()
    assert bool(result.output.isfinite().all()) and graphs_of(runner).passes == 0
    (reason,) = graphs_of(runner).refusals.values()
    assert re.search(why, reason) and not (tmp_path / "crashes").read_text()
