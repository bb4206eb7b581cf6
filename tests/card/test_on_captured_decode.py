"""Captured steps give what ordinary ones give, whatever becomes of their cohort; who cannot be captured is served all the same."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from swarmnode.compute.executor import card_answers
from swarmnode.compute.model.adapters.span_adapters import Lora
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.serving.captured_decode import STEADY_STEPS, CapturedDecode, StaticColumns
from swarmnode.compute.serving.cohort import Window, sliding_layers
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.serving.runner import WANT_ALL, WANT_NOTHING, RunnerConfig, StageRunner, StepInput
from swarmnode.compute.stopwatch import Stopwatch, Tell
from swarmnode.config import INT8_KV, PLAIN
from swarmnode.ledger import Account, MemoryLedger
from tests.numerics.families import tiny_config

CheckpointOf = Callable[[str], Checkpoint]
CLOSE = {"atol": 1e-4, "rtol": 1e-3}


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> CheckpointOf:
    """A tiny checkpoint of a family, by its name."""

    @functools.cache
    def save(model_type: str) -> Checkpoint:
        folder: Path = tmp_path_factory.mktemp(model_type)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(tiny_config(model_type), dtype=torch.float32).save_pretrained(folder)
        return Checkpoint(folder)

    return save


class Dictated(Stopwatch):
    """Tells of passes what the test says, in turn: of a replay, and of the ordinary pass beside it."""

    def __init__(self, device: torch.device, replay_s: float, ordinary_s: float) -> None:
        super().__init__(device)
        self._seconds = itertools.cycle((replay_s, ordinary_s))

    @contextmanager
    def timing(self, tell: Tell) -> Iterator[None]:
        yield
        tell(next(self._seconds))


def open_runner(
    checkpoint: Checkpoint,
    card: torch.device,
    *,
    capture: bool,
    start: int = 0,
    ledger: MemoryLedger | None = None,
    replay_s: float = 1.0,
    kv: str = PLAIN,
) -> StageRunner:
    """A runner whose ordinary passes take two seconds for all that it knows."""
    span = load_span(checkpoint, start, checkpoint.units, device=card, check=False)
    windows = {layer: Window(size, slack=8, room=16) for layer, size in sliding_layers(span.config).items()}
    runner = StageRunner(span, RunnerConfig(1 << 24, windows=windows, capture=capture, kv=kv), ledger=ledger)
    if runner.captured is not None:
        runner.captured.stopwatch = Dictated(card, replay_s, 2.0)
    return runner


def random_inputs(runner: StageRunner) -> Callable[[int], Tensor]:
    """Inputs (1, T) of a span, the same every time: ids, or hidden states."""
    generator = torch.Generator().manual_seed(1)
    if runner.span.has_embedding:
        return lambda count: torch.randint(0, 90, (1, count), generator=generator)
    return lambda count: torch.randn(1, count, runner.span.hidden_size, generator=generator)


def decode(runner: StageRunner, steps: int, spoil: int = -1, adapter: str = "") -> list[Tensor]:
    """Two sessions of unlike lengths; the first is cut back on the way, the second misses a step. At step `spoil` the first
    one sends NaN, four positions at once, and is cut back behind them."""
    inputs = random_inputs(runner)
    for name, length in (("a", 5), ("b", 9)):
        runner.open(name, rows=1, max_length=200, adapter=adapter)
        runner.run([StepInput(name, inputs(length), WANT_NOTHING)])
    outputs = []
    for step in range(steps):
        if step == steps - 6:
            runner.truncate("a", runner.length("a") - 2)
        if step == spoil:
            runner.run([StepInput("a", inputs(4) * float("nan"))])
            runner.truncate("a", runner.length("a") - 4)
        results = runner.run([StepInput(name, inputs(1)) for name in ("a" if step == steps - 4 else "ab")])
        outputs.append(torch.cat([result.output.cpu() for result in results]))
    return outputs


def decode_with_guesses(runner: StageRunner, steps: int) -> list[Tensor]:
    """Two sessions whose steps have two to four positions, some of which are cut off again before the next step."""
    inputs, random = random_inputs(runner), Random(5)
    for name, length in (("a", 5), ("b", 9)):
        runner.open(name, rows=1, max_length=200)
        runner.run([StepInput(name, inputs(length), WANT_NOTHING)])
    outputs = []
    for _ in range(steps):
        works = []
        for name in "ab":
            back_to = runner.length(name) - random.choice((0, 0, 1, 2))
            works.append(StepInput(name, inputs(random.choice((3, 3, 4, 2))), WANT_ALL, truncate_to=back_to))
        outputs += [result.output.cpu() for result in runner.run(works)]
    return outputs


def same(captured: StageRunner, ordinary: StageRunner, **options: Any) -> None:
    for got, wanted in zip(decode(captured, 30, **options), decode(ordinary, 30, **options), strict=True):
        torch.testing.assert_close(got, wanted, **CLOSE)


def decoder(runner: StageRunner) -> CapturedDecode:
    assert runner.captured is not None
    return runner.captured


# Rotary positions, windows that move, biases by distance; docs/decisions/cards.md has all families that were tried.
@pytest.mark.parametrize("start", [0, 2], ids=["whole", "later layers"])
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "bloom"])
def test_a_captured_step_is_the_ordinary_one(
    model_type: str, start: int, checkpoint_of: CheckpointOf, card: torch.device
) -> None:
    """Also of a hop without the first layer, which families ask the cache about."""
    checkpoint = checkpoint_of(model_type)
    captured, ordinary = (open_runner(checkpoint, card, capture=capture, start=start) for capture in (True, False))
    same(captured, ordinary)
    assert decoder(captured).replays > STEADY_STEPS and ordinary.captured is None


@pytest.mark.parametrize("spoil", [-1, 20])
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_a_captured_step_reads_caches_in_8_bits(
    model_type: str, spoil: int, checkpoint_of: CheckpointOf, card: torch.device
) -> None:
    """Also behind scales that were NaN, and cut off again."""
    checkpoint = checkpoint_of(model_type)
    captured, ordinary = (
        open_runner(checkpoint, card, capture=capture, start=1, kv=INT8_KV) for capture in (True, False)
    )
    same(captured, ordinary, spoil=spoil)
    assert decoder(captured).replays > 0


def test_a_captured_step_goes_through_its_adapter(checkpoint_of: CheckpointOf, card: torch.device) -> None:
    checkpoint = checkpoint_of("llama")
    captured, ordinary = (open_runner(checkpoint, card, capture=capture) for capture in (True, False))
    for runner in (captured, ordinary):
        generator = torch.Generator().manual_seed(3)
        for name in ("a", "b"):
            layers = {f"model.layers.{layer}.self_attn.q_proj": runner.span.hidden_size for layer in range(2)}
            sizes = {layer: (torch.randn(4, size, generator=generator), size) for layer, size in layers.items()}
            loras = {
                layer: Lora(a.to(card), torch.randn(size, 4, generator=generator).to(card))
                for layer, (a, size) in sizes.items()
            }
            runner.span.adapters.add(name, loras)
    texts = []
    for name in ("a", "b", ""):
        replays = decoder(captured).replays
        same(captured, ordinary, adapter=name)
        assert decoder(captured).replays > replays + STEADY_STEPS
        for runner in (captured, ordinary):
            runner.close("a")
            runner.close("b")
        texts.append(torch.cat(decode(ordinary, 12, adapter=name)))
        ordinary.close("a")
        ordinary.close("b")
    assert not any(torch.allclose(one, other, atol=0.01) for one, other in itertools.combinations(texts, 2))


@pytest.mark.parametrize(("model_type", "start"), [("llama", 0), ("gemma3_text", 2)])
def test_steps_with_guesses_are_captured_by_a_few_numbers_of_columns(
    model_type: str, start: int, checkpoint_of: CheckpointOf, card: torch.device
) -> None:
    checkpoint = checkpoint_of(model_type)
    captured, ordinary = (open_runner(checkpoint, card, capture=capture, start=start) for capture in (True, False))
    outputs = zip(decode_with_guesses(captured, 36), decode_with_guesses(ordinary, 36), strict=True)
    for got, wanted in outputs:
        torch.testing.assert_close(got, wanted, **CLOSE)
    shapes = {shape.columns for steps in decoder(captured)._captured.values() for shape in steps}
    assert decoder(captured).replays > 0 and shapes <= {4}


def test_who_needs_the_host_is_served_as_before(checkpoint_of: CheckpointOf, card: torch.device) -> None:
    """Falcon looks keys up by a list, which comes from the host; the card is not lost by trying."""
    runner = open_runner(checkpoint_of("falcon"), card, capture=True)
    assert all(bool(output.isfinite().all()) for output in decode(runner, STEADY_STEPS + 1))
    assert "synchronizing CUDA operation" in decoder(runner).refusal and card_answers()


@pytest.mark.parametrize("spoil", [STEADY_STEPS - 1, 20])
def test_what_a_neighbour_sent_leaves_nothing_behind(
    spoil: int, checkpoint_of: CheckpointOf, card: torch.device
) -> None:
    """Masked columns meet a weight of zero, and NaN survives that."""
    checkpoint = checkpoint_of("llama")
    captured, ordinary = (open_runner(checkpoint, card, capture=capture, start=1) for capture in (True, False))
    same(captured, ordinary, spoil=spoil)
    assert decoder(captured).replays > 0


def test_other_numbers_are_not_believed(
    checkpoint_of: CheckpointOf, card: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = StaticColumns.update

    def wrong(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        return tuple(1.5 * states for states in update(*args, **kwargs))

    monkeypatch.setattr(StaticColumns, "update", wrong)
    checkpoint = checkpoint_of("llama")
    captured, ordinary = (open_runner(checkpoint, card, capture=capture) for capture in (True, False))
    outputs = [decode(runner, STEADY_STEPS + 2)[-2:] for runner in (captured, ordinary)]
    torch.testing.assert_close(*outputs, **CLOSE)
    assert decoder(captured).replays == 0 and not decoder(captured).refusal


def test_what_is_slower_replayed_stays_ordinary(checkpoint_of: CheckpointOf, card: torch.device) -> None:
    ledger = MemoryLedger()
    runner = open_runner(checkpoint_of("llama"), card, capture=True, ledger=ledger, replay_s=3.0)
    decode(runner, 3 * STEADY_STEPS)
    assert decoder(runner).replays == 0 and not decoder(runner).refusal
    assert ledger.accounts()[Account.ACTIVATIONS] == 0, "the graph is gone"


def test_a_real_stopwatch_times_both(
    checkpoint_of: CheckpointOf, card: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    runner = open_runner(checkpoint_of("llama"), card, capture=True)
    decoder(runner).stopwatch = Stopwatch(card)
    with caplog.at_level(logging.INFO, "swarmnode.compute.serving.captured_decode"):
        decode(runner, STEADY_STEPS + 1)
    (told,) = (record.args for record in caplog.records if "a captured step of" in record.msg)
    assert isinstance(told, tuple) and all(
        0 <= seconds < 60 for seconds in told[1:]
    )  # 0 by the simulated card's own clock


def test_a_graph_is_in_the_ledger_while_its_cohort_lives(checkpoint_of: CheckpointOf, card: torch.device) -> None:
    ledger = MemoryLedger()
    runner = open_runner(checkpoint_of("llama"), card, capture=True, ledger=ledger)
    decode(runner, STEADY_STEPS + 1)
    assert ledger.accounts()[Account.ACTIVATIONS] > 0
    runner.close("a")
    assert ledger.accounts()[Account.ACTIVATIONS] == 0
    ledger.limit_bytes = ledger.used_bytes
    inputs = random_inputs(runner)
    for _ in range(2 * STEADY_STEPS):
        runner.run([StepInput("b", inputs(1))])
    assert decoder(runner).replays == 1 and not decoder(runner).refusal
