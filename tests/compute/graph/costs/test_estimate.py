"""Estimates agree with what is known by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from swarmnode.compute.graph.costs import estimate
from swarmnode.compute.graph.costs.estimate import estimate_span, estimate_units
from swarmnode.compute.graph.costs.rates import FRESH, PLAIN, REFERENCE, measure_rates
from swarmnode.compute.graph.exporting.module_export import export_module
from swarmnode.compute.graph.serialise import read_graph
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.training.randomness import CounterDropout
from tests.compute.graph.models import batch_of, build, loss_of

BATCH, LENGTH, WIDTH = 3, 8, 16


class Attention(nn.Module):
    """One projection for all of query, key and value."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x_BTH: Tensor) -> Tensor:
        x_BNTH = self.projection(x_BTH)[:, None]
        return functional.scaled_dot_product_attention(x_BNTH, x_BNTH, x_BNTH).sum()


def test_flops_are_those_of_the_formula() -> None:
    graph = export_module(Attention(), (torch.zeros(BATCH, LENGTH, WIDTH),)).graph
    (unit,) = estimate_units(graph)
    product, attention = 2 * BATCH * LENGTH * WIDTH * WIDTH, 2 * BATCH * LENGTH * LENGTH * WIDTH
    assert unit.forward.flops == product + 2 * attention
    assert unit.backward.flops == product + 5 * attention  # the input takes no gradient
    assert unit.parameter_bytes == 4 * WIDTH * WIDTH
    assert unit.boundary_bytes == 4 * BATCH * LENGTH * WIDTH


def test_work_grows_with_the_batch(folder: Callable[[str], Path]) -> None:
    graph = read_graph(folder("unet"))
    once, twice = ([unit.forward.flops for unit in estimate_units(graph, batch)] for batch in (4, 8))
    assert twice == [2 * flops for flops in once]


@pytest.mark.parametrize("kind", ["gpt2", "resnet", "unet"])
def test_activation_bytes_are_what_autograd_keeps(folder: Callable[[str], Path], kind: str) -> None:
    module, batch = build(kind), batch_of(kind, 4)
    held = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())}
    kept: dict[int, tuple[int, Tensor]] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in held:
            kept[tensor.untyped_storage().data_ptr()] = (tensor.untyped_storage().nbytes(), tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = loss_of(module, batch)
    assert loss.requires_grad
    estimated = sum(unit.activation_bytes for unit in estimate_units(read_graph(folder(kind))))
    assert estimated == pytest.approx(sum(nbytes for nbytes, _ in kept.values()), rel=0.25)


def test_blocks_that_are_alike_are_estimated_once(
    folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = read_graph(folder("gpt2"))  # whose export estimates, too
    estimate_call = lru_cache(maxsize=None)(estimate._estimate_call.__wrapped__)
    monkeypatch.setattr(estimate, "_estimate_call", estimate_call)
    once, twice = estimate_units(graph), estimate_units(graph)
    calls = estimate_call.cache_info()
    assert once == twice and calls.hits + calls.misses == 2 * len(graph.nodes)
    assert calls.misses < len(graph.nodes) / 2


def test_spans_are_estimated_from_the_config(tmp_path: Path) -> None:
    config = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=3, num_attention_heads=2, vocab_size=99
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    units = estimate_span(Checkpoint(tmp_path), BATCH, LENGTH)
    assert len(units) == 5
    tokens = BATCH * LENGTH
    layer = 2 * tokens * WIDTH * (4 * WIDTH + 3 * 2 * WIDTH) + 4 * tokens * LENGTH * WIDTH
    head = 2 * tokens * WIDTH * 99
    assert [unit.forward.flops for unit in units] == [0, layer, layer, layer, head]
    assert [unit.backward.flops > 1.9 * unit.forward.flops for unit in units] == [False, True, True, True, True]
    assert units[0].boundary_bytes == 8 * tokens and units[1].boundary_bytes == 4 * tokens * WIDTH
    assert units[0].parameter_bytes == units[4].parameter_bytes - 4 * WIDTH == 4 * 99 * WIDTH


def test_a_learner_writes_what_it_keeps_to_fresh_memory_and_adds_up_gradients() -> None:
    (unit,) = estimate_units(export_module(Attention(), (torch.zeros(BATCH, LENGTH, WIDTH),)).graph)
    extra_s = unit.activation_bytes / REFERENCE.per_s[FRESH] + 3 * unit.parameter_bytes / REFERENCE.per_s[PLAIN]
    assert unit.learning_s(REFERENCE) == pytest.approx(unit.seconds(REFERENCE) + extra_s)


def test_dropout_is_timed_as_learners_draw_it(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[torch.Size] = []
    drop = CounterDropout._drop

    def note(self: CounterDropout, input: Tensor, p: float) -> tuple[Tensor, Tensor]:
        drawn.append(input.shape)
        return drop(self, input, p)

    monkeypatch.setattr(CounterDropout, "_drop", note)
    measure_rates()
    assert drawn


def test_rates_of_this_machine_are_measured() -> None:
    rates = measure_rates()
    assert rates.per_s.keys() == REFERENCE.per_s.keys()
    assert all(1e3 < rate < 1e15 for rate in rates.per_s.values())
