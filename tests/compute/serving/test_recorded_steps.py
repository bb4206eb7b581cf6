"""Decode steps recorded as flat programs: they give what ordinary passes give, whatever becomes of their cohort."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.span import ModelSpan
from swarmnode.compute.packing.ggml import library
from swarmnode.compute.serving.captured_decode import STEADY_STEPS, CannotBeRecorded, Recorder, StaticColumns
from swarmnode.compute.serving.cohort import Window, sliding_layers
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.serving.runner import WANT_NOTHING, RunnerConfig, StageRunner, StepInput
from swarmnode.ledger import Account, MemoryLedger
from tests.card.test_on_captured_decode import CLOSE, Dictated, decode_with_guesses, decoder
from tests.compute.model.llama_gguf import save_llama_gguf, save_moe_gguf
from tests.compute.packing.test_dequantize import quantise
from tests.compute.packing.test_packed_weight import pack
from tests.llama import save_llama
from tests.numerics.families import tiny_config

STEPS = 30
needs_ggml = pytest.mark.skipif(
    library() is None, reason="the package xllamacpp is not installed, or not for this machine"
)


def plain_span(model_type: str, folder: Path) -> ModelSpan:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny_config(model_type), dtype=torch.float32).save_pretrained(folder)
    return load_span(Checkpoint(folder), 0, Checkpoint(folder).units, check=False)


def packed_span(save: Callable[..., None], folder: Path, products: str = "fast") -> ModelSpan:
    save(folder / "tiny.gguf", form="Q4_0")
    checkpoint = pack(folder / "tiny.gguf", folder / "packed")
    return load_span(checkpoint, 0, checkpoint.units, dtype=torch.float32, products=products, check=False)


def open_runner(
    span: ModelSpan, *, capture: bool, ledger: MemoryLedger | None = None, replay_s: float = 1.0, kv: str = "plain"
) -> StageRunner:
    """Return a runner without graphs of ggml whose ordinary passes take two seconds by its stopwatch."""
    windows = {layer: Window(size, slack=8, room=16) for layer, size in sliding_layers(span.config).items()}
    runner = StageRunner(span, RunnerConfig(1 << 24, windows=windows, capture=capture, kv=kv), ledger=ledger)
    runner.graphs = None
    if runner.captured is not None:
        runner.captured.stopwatch = Dictated(span.device, replay_s, 2.0)
    return runner


def decode(
    runner: StageRunner, steps: int = STEPS, behind: int = 0, last: Callable[[], None] = lambda: None
) -> list[Tensor]:
    """Decode two sessions of unlike lengths behind `behind` positions; the first is cut back once, the second misses a step.

    `last` is called before the last step.
    """
    generator = torch.Generator().manual_seed(1)
    for name, length in (("a", 5), ("b", 9)):
        runner.open(name, rows=1, max_length=behind + 200)
        prompt_BT = torch.randint(0, 90, (1, behind + length), generator=generator)
        runner.run([StepInput(name, prompt_BT, WANT_NOTHING)])
    outputs = []
    for step in range(steps):
        if step == steps - 6:
            runner.truncate("a", runner.length("a") - 2)
        if step == steps - 1:
            last()
        names = "a" if step == steps - 4 else "ab"
        works = [StepInput(name, torch.randint(0, 90, (1, 1), generator=generator)) for name in names]
        outputs.append(torch.cat([result.output for result in runner.run(works)]))
    return outputs


@pytest.mark.parametrize("kv", ["plain", "int8"])
@pytest.mark.parametrize(("behind", "threads"), [(0, 1), (1100, 2)])
@needs_ggml
def test_a_recorded_step_of_fast_products_has_the_ordinary_ones_bits(
    kv: str, behind: int, threads: int, tmp_path: Path, set_threads: Callable[[int], None]
) -> None:
    span = packed_span(save_llama_gguf, tmp_path)
    recorded, ordinary = (open_runner(span, capture=capture, kv=kv) for capture in (True, False))
    wanted = decode(ordinary, behind=behind)
    got = decode(recorded, behind=behind, last=lambda: set_threads(threads))
    assert all(map(torch.equal, got, wanted))
    assert decoder(recorded).replays > STEADY_STEPS and ordinary.captured is None


@needs_ggml
def test_recorded_steps_with_guesses_have_the_ordinary_ones_bits(tmp_path: Path) -> None:
    span = packed_span(save_llama_gguf, tmp_path)
    recorded, ordinary = (open_runner(span, capture=capture) for capture in (True, False))
    texts = (decode_with_guesses(runner, 40) for runner in (recorded, ordinary))
    assert all(torch.equal(got, wanted) for got, wanted in zip(*texts, strict=True))
    shapes = {shape.columns for steps in decoder(recorded)._captured.values() for shape in steps}
    assert decoder(recorded).replays > STEADY_STEPS and len(shapes) > 1


# Rotary positions, windows that move, biases by distance.
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "bloom"])
def test_a_recorded_step_of_plain_weights_is_the_ordinary_one(model_type: str, tmp_path: Path) -> None:
    span = plain_span(model_type, tmp_path)
    recorded, ordinary = (open_runner(span, capture=capture) for capture in (True, False))
    for got, wanted in zip(decode(recorded), decode(ordinary), strict=True):
        torch.testing.assert_close(got, wanted, **CLOSE)
    assert decoder(recorded).replays > STEADY_STEPS


@needs_ggml
def test_exact_products_are_recorded_as_a_whole(tmp_path: Path) -> None:
    span = packed_span(save_llama_gguf, tmp_path, products="exact")
    recorded, ordinary = (open_runner(span, capture=capture) for capture in (True, False))
    for got, wanted in zip(decode(recorded), decode(ordinary), strict=True):
        torch.testing.assert_close(got, wanted, **CLOSE)
    assert decoder(recorded).replays > STEADY_STEPS


@needs_ggml
@pytest.mark.parametrize("method", ["fp8", "nf4"])
def test_products_in_tiles_are_recorded_without_their_weights(method: str, tmp_path: Path) -> None:
    save_llama(tmp_path / "llama", layers=2)
    quantise(tmp_path / "llama", tmp_path / "quantised", method)
    checkpoint = Checkpoint(tmp_path / "quantised")
    span = load_span(checkpoint, 1, 3, dtype=torch.float32, products="exact", check=False)
    hidden = torch.randn(1, 1, span.hidden_size)
    with torch.inference_mode():
        with Recorder() as recorder:
            output = span.forward(hidden, cache=None, position_ids=torch.zeros(1, 1, dtype=torch.int64))
        program = recorder.program()
        wanted = output.clone()
        output.zero_()
        program.run()
    assert torch.equal(output, wanted)
    assert program.nbytes < span.weight_bytes


@needs_ggml
def test_experts_that_the_values_choose_are_not_recorded(tmp_path: Path) -> None:
    runner = open_runner(packed_span(save_moe_gguf, tmp_path), capture=True)
    assert all(bool(output.isfinite().all()) for output in decode(runner))
    assert "depends on values" in decoder(runner).refusal and decoder(runner).replays == 0


def test_other_numbers_are_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    span = plain_span("llama", tmp_path)
    update = StaticColumns.update
    monkeypatch.setattr(
        StaticColumns, "update", lambda *args, **kwargs: tuple(1.5 * states for states in update(*args, **kwargs))
    )
    runners = [open_runner(span, capture=capture) for capture in (True, False)]
    torch.testing.assert_close(*(decode(runner, STEADY_STEPS + 6)[-2:] for runner in runners), **CLOSE)
    assert decoder(runners[0]).replays == 0 and not decoder(runners[0]).refusal


def test_what_is_slower_replayed_stays_ordinary(tmp_path: Path) -> None:
    ledger = MemoryLedger()
    runner = open_runner(plain_span("llama", tmp_path), capture=True, ledger=ledger, replay_s=3.0)
    decode(runner)
    assert decoder(runner).replays == 0 and not decoder(runner).refusal
    assert ledger.accounts()[Account.ACTIVATIONS] == 0, "the program is gone"


def test_a_program_is_in_the_ledger_and_gone_with_its_cohorts_buffers(tmp_path: Path) -> None:
    ledger = MemoryLedger()
    runner = open_runner(plain_span("llama", tmp_path), capture=True, ledger=ledger)
    decode(runner, STEADY_STEPS + 6)
    assert decoder(runner).replays > 0 and ledger.accounts()[Account.ACTIVATIONS] > 0
    held = [weakref.ref(buffer) for buffers in runner.pool.cohorts[0].buffers.values() for buffer in buffers]
    runner.close("a")
    gc.collect()
    assert ledger.accounts()[Account.ACTIVATIONS] == 0
    assert not any(buffer() is not None for buffer in held)
    runner.close_all()
    assert ledger.used_bytes == 0


def test_a_program_is_gone_once_its_cohorts_windows_have_moved(tmp_path: Path) -> None:
    ledger = MemoryLedger()
    runner = open_runner(plain_span("gemma3_text", tmp_path), capture=True, ledger=ledger)
    decode(runner)
    held_bytes, programs = [], []
    for _ in range(STEPS):
        runner.run([StepInput(name, torch.ones(1, 1, dtype=torch.int64)) for name in "ab"])
        held_bytes.append(ledger.accounts()[Account.ACTIVATIONS])
        programs += [len(cohort.when_given_up) for cohort in runner.pool.cohorts]
    assert held_bytes[0] > 0 and 0 in held_bytes, "windows moved while there was a program"
    assert set(programs) == {0, 1}


@pytest.mark.parametrize("function", [torch.nonzero, torch.Tensor.item, torch.rand_like, lambda x: x[x > 0]])
def test_values_and_random_numbers_are_refused(function: Callable[[Tensor], Any]) -> None:
    with pytest.raises(CannotBeRecorded), Recorder():
        function(torch.ones(1))


def test_a_program_goes_again_through_writes_views_and_several_results() -> None:
    x = torch.arange(6.0)
    with torch.inference_mode(), Recorder() as recorder:
        kept = torch.zeros(2, 3)
        kept[1].copy_(x.view(2, 3)[0] + 1)
        values, places = kept.sort(dim=1, descending=True)
        total = torch.cat([values, kept]).to(torch.float64).cumsum(0).float() @ torch.ones(3) + places.sum()
    program = recorder.program()
    for start in (3.0, -7.0):
        x.copy_(torch.arange(6.0) + start)
        with torch.inference_mode():
            program.run()
        rows = torch.stack([torch.zeros(3), x[:3] + 1])
        ordered, where = rows.sort(dim=1, descending=True)
        assert torch.equal(total, torch.cat([ordered, rows]).cumsum(0) @ torch.ones(3) + where.sum())
