"""Sliding windows: layers keep what they can see again and nothing more, and the text stays the whole model's."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.span import ModelSpan
from swarmnode.compute.serving.cohort import ROLLBACK, Window, sliding_layers
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.serving.runner import WANT_ALL, RunnerConfig, StageRunner, StepInput
from swarmnode.errors import ErrorCode, ProtocolError
from tests.numerics.families import COMMON
from tests.numerics.test_families import TOLERANCE, difference

WINDOW = 16
LENGTH = 420  # beyond what the buffers of a window have
MODELS: dict[str, dict[str, Any]] = {
    "mistral": {},
    "gemma3_text": {"head_dim": 8, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2},
}
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", params=MODELS)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[ModelSpan]]:
    """The whole model, and two spans of it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    options = {**COMMON, "num_hidden_layers": 6, "sliding_window": WINDOW, "max_position_embeddings": 1024}
    config = CONFIG_MAPPING[request.param](**{**options, **MODELS[request.param]})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    path: Path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path)
    checkpoint = Checkpoint(path)
    return model, [load_span(checkpoint, start, end) for start, end in pairwise([0, 4, checkpoint.units])]


class Spans:
    """The two spans as hops of a route, with what the whole model says to compare."""

    def __init__(self, trained: tuple[Any, list[ModelSpan]], **window: int) -> None:
        self.model, spans = trained
        windows = {layer: Window(size, **window) for layer, size in sliding_layers(self.model.config).items()}
        self.runners = [StageRunner(span, RunnerConfig(1 << 26, windows=windows)) for span in spans]
        self.ids = torch.randint(2, 97, (1, LENGTH), generator=torch.Generator().manual_seed(2))

    def open(self, name: str, max_length: int = LENGTH) -> None:
        for runner in self.runners:
            runner.open(name, rows=1, max_length=max_length)

    def step(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Logits of all positions of these inputs, together."""
        x = inputs
        for runner in self.runners:
            results = runner.run([StepInput(name, tensor, WANT_ALL) for name, tensor in x.items()])
            x = {str(result.session_id): result.output for result in results}
        return x

    def truncate(self, name: str, length: int) -> None:
        for runner in self.runners:
            runner.truncate(name, length)

    def expected(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids).logits


@torch.inference_mode()
def test_a_long_text_is_the_whole_models_and_windows_stay_small(trained: tuple[Any, list[ModelSpan]]) -> None:
    spans = Spans(trained)
    spans.open("a")
    logits = [spans.step({"a": spans.ids[:, :300]})["a"]]
    logits += [spans.step({"a": spans.ids[:, t : t + 1]})["a"] for t in range(300, LENGTH)]
    assert difference(torch.cat(logits, 1), spans.expected(spans.ids)) < TOLERANCE
    for runner in spans.runners:
        cohort = runner.pool.sessions["a"].cohort
        assert cohort is not None
        for layer, (keys, _) in cohort.buffers.items():
            window = runner.pool.windows.get(layer)
            assert keys.shape[2] == (cohort.capacity if window is None else window.columns)
        assert runner.pool.allocated_bytes <= runner.pool.reserved_bytes


@torch.inference_mode()
def test_what_lay_in_the_memory_of_a_buffer_does_not_matter(
    trained: tuple[Any, list[ModelSpan]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded steps read all columns, masked. Large values there would overflow with some queries, and not with others."""
    new_empty = torch.Tensor.new_empty

    def large(like: torch.Tensor, *size: Any, **options: Any) -> torch.Tensor:
        tensor = new_empty(like, *size, **options)
        return tensor.fill_(8e37) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch.Tensor, "new_empty", large)
    spans = Spans(trained)
    spans.open("a")
    logits = [spans.step({"a": spans.ids[:, :300]})["a"]]
    logits += [spans.step({"a": spans.ids[:, t : t + 1]})["a"] for t in range(300, LENGTH)]
    assert difference(torch.cat(logits, 1), spans.expected(spans.ids)) < TOLERANCE


@torch.inference_mode()
def test_sessions_of_many_lengths_come_and_go(trained: tuple[Any, list[ModelSpan]]) -> None:
    """Together, absent for a while, back again; each must say what it would alone."""
    spans = Spans(trained, room=8)
    lengths = {"a": 170, "b": 90, "c": 7, "d": 140}
    texts = {name: spans.ids[:, index : index + 260] for index, name in enumerate(lengths)}
    at = dict(lengths)
    logits: dict[str, list[torch.Tensor]] = {}
    for name, length in lengths.items():
        spans.open(name)
        logits[name] = [spans.step({name: texts[name][:, :length]})[name]]
    generator = torch.Generator().manual_seed(3)
    for _ in range(80):
        present = [name for name in lengths if torch.rand(1, generator=generator) < 0.8] or ["a"]
        outputs = spans.step({name: texts[name][:, at[name] : at[name] + 1] for name in present})
        for name in present:
            at[name] += 1
            logits[name].append(outputs[name])
    for name, text in texts.items():
        assert difference(torch.cat(logits[name], 1), spans.expected(text[:, : at[name]])) < TOLERANCE
        assert all(runner.length(name) == at[name] for runner in spans.runners)


@torch.inference_mode()
def test_positions_are_cut_off_and_said_anew(trained: tuple[Any, list[ModelSpan]]) -> None:
    spans = Spans(trained, room=8)
    for name in ("a", "b"):
        spans.open(name)
    spans.step({"a": spans.ids[:, :200]})
    spans.step({"b": spans.ids[:, :120]})
    for t in range(20):  # both in one cohort
        spans.step({"a": spans.ids[:, 200 + t : 201 + t], "b": spans.ids[:, 120 + t : 121 + t]})
    spans.truncate("a", 220 - ROLLBACK)
    back = spans.step({"a": spans.ids[:, 220 - ROLLBACK : 260]})["a"]
    assert difference(back, spans.expected(spans.ids[:, :260])[:, 220 - ROLLBACK :]) < TOLERANCE
    after = spans.step({"b": spans.ids[:, 140:141]})["b"]
    assert difference(after, spans.expected(spans.ids[:, :141])[:, -1:]) < TOLERANCE
    with pytest.raises(ProtocolError, match="windows have moved on") as caught:
        spans.truncate("a", 40)
    assert caught.value.code is ErrorCode.NO_SESSION
    again = spans.step({"a": spans.ids[:, 260:270]})["a"]
    assert difference(again, spans.expected(spans.ids[:, :270])[:, 260:]) < TOLERANCE


def test_a_reservation_counts_the_window_alone(trained: tuple[Any, list[ModelSpan]]) -> None:
    spans = Spans(trained)
    for runner in spans.runners:
        start, end = runner.span.start, runner.span.end
        layers = runner.span.layers_of(start, end)
        sliding = [layer for layer in layers if layer in runner.pool.windows]
        near, far = (runner.reservation_bytes(1, length, start, end) for length in (1000, 100_000))
        per_position = 2 * 2 * 8 * 4  # keys and values, heads, dim, bytes
        full = len(layers) - len(sliding)
        assert far - near == 99_000 * (full + min(full, 1)) * per_position
