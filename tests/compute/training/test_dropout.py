"""Dropout by counters: the same bits wherever it is computed, and as random as dropout has to be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

from swarmnode.compute.graph import graph_segment
from swarmnode.compute.graph.exporting.module_export import export_module
from swarmnode.compute.graph.graph_segment import GraphSegment
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.training import lm
from swarmnode.compute.training import randomness as module
from swarmnode.compute.training.lm import SpanSegment, load_segment
from swarmnode.compute.training.randomness import CounterDropout, keep_mask
from swarmnode.compute.training.segment import Segment
from tests.numerics.families import tiny_config

CPU = torch.device("cpu")
EXAMPLE = [1, 0, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1]


def begun(seed: int = 1, unit: int = 0) -> CounterDropout:
    counted = CounterDropout()
    counted.begin(seed, unit)
    return counted


# -- masks


def test_peers_of_any_version_draw_the_same() -> None:
    """protocol/training.md has this example."""
    assert keep_mask(1, (24,), 0.5, CPU).int().tolist() == EXAMPLE


@pytest.mark.parametrize("block", [1 << 8, 1 << 12])
def test_a_mask_does_not_depend_on_how_many_words_are_made_at_a_time(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = keep_mask(7, (3, 5000), 0.3, CPU)
    monkeypatch.setattr(module, "_CPU_BLOCK", block)
    assert torch.equal(keep_mask(7, (3, 5000), 0.3, CPU), whole)


def test_counters_beyond_those_of_a_key_have_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a tensor with 2 ** 31 elements and more."""
    monkeypatch.setattr(module, "_CPU_BLOCK", 1 << 8)
    monkeypatch.setattr(module, "_COUNTERS", 1 << 9)
    first, second = keep_mask(7, (1 << 10,), 0.5, CPU).chunk(2)
    assert 0.4 < (first == second).float().mean() < 0.6


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
def test_so_many_are_dropped(p: float) -> None:
    count = 1 << 22
    dropped = count - int(keep_mask(3, (count,), p, CPU).sum())
    assert abs(dropped - p * count) < 5 * (p * (1 - p) * count) ** 0.5


def agreement(one: Tensor, other: Tensor) -> float:
    """Standard deviations by which two fair masks agree more, or less, than by chance."""
    return abs(2 * float((one == other).double().mean()) - 1) * one.numel() ** 0.5


@pytest.mark.parametrize("lag", [1, 2, 3, 64, 1000, 4096, 65536])
def test_neighbours_know_nothing_of_each_other(lag: int) -> None:
    kept = keep_mask(11, (1 << 20,), 0.5, CPU)
    assert agreement(kept[lag:], kept[:-lag]) < 5


def test_draws_units_and_microbatches_know_nothing_of_each_other() -> None:
    ones = torch.ones(1 << 18)
    masks = []
    for seed, unit in ((1, 0), (1, 1), (2, 0), (3, 0)):
        counted = begun(seed, unit)
        masks += [counted.dropout(ones, 0.5) > 0 for _ in range(3)]
    assert all(agreement(one, other) < 5 for n, one in enumerate(masks) for other in masks[:n])


# -- what is put in place of torch's


@pytest.mark.parametrize(
    "drop",
    [
        nn.Dropout(0.25),
        lambda x: functional.dropout(x, 0.25),
        lambda x: torch.dropout(x, 0.25, True),
        lambda x: torch.ops.aten.dropout.default(x, 0.25, True),
        lambda x: torch.ops.aten.native_dropout.default(x, 0.25, True)[0],
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_way_to_drop(drop: Any, dtype: torch.dtype) -> None:
    x = torch.randn(40, 50, generator=torch.Generator().manual_seed(0), dtype=dtype).requires_grad_()
    kept = begun().dropout(torch.ones(40, 50), 0.25) > 0
    before = torch.get_rng_state()
    with begun():
        dropped = drop(x)
    assert torch.equal(torch.get_rng_state(), before), "torch's generator was not asked"
    wanted = torch.where(kept, x.detach() * (1 / 0.75), torch.zeros((), dtype=dtype))
    assert torch.equal(dropped, wanted) and dropped.dtype == dtype
    (gradient,) = torch.autograd.grad(dropped.sum(), x)
    assert torch.equal(gradient, kept.to(dtype) * torch.tensor(1 / 0.75, dtype=dtype))


def test_nothing_is_dropped_where_nothing_is_to_be() -> None:
    x = torch.randn(9)
    with begun():
        for p, training in ((0.0, True), (0.5, False)):
            assert torch.equal(functional.dropout(x, p, training), x)
        assert torch.equal(functional.dropout(x, 1.0), torch.zeros(9))
        assert torch.equal(torch.ops.aten.native_dropout.default(x, 0.5, False)[0], x)

        for p in (-0.1, 1.5, float("nan")):
            with pytest.raises(ValueError, match="a dropout of"):
                functional.dropout(x, p)


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "a scale": {"scale": 0.3},
    "shared keys": {"enable_gqa": True},
    "a mask": {"attn_mask": torch.ones(6, 6, dtype=torch.bool).tril(2)},
    "a bias": {"attn_mask": torch.linspace(-3, 3, 36).view(6, 6)},
    "a row that sees nothing": {"attn_mask": torch.ones(6, 6, dtype=torch.bool).tril(-1)},
}


@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)
def test_attention_is_torchs_but_for_what_is_dropped(how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    heads = 2 if how.get("enable_gqa") else 4
    query, key, value = (torch.randn(2, n, 6, 8, requires_grad=True) for n in (4, heads, heads))
    whole = functional.scaled_dot_product_attention(query, key, value, **how)
    with begun():
        assert torch.equal(functional.scaled_dot_product_attention(query, key, value, **how), whole)
    monkeypatch.setattr(module, "keep_mask", lambda _draw, shape, *_: torch.ones(shape, dtype=torch.bool))
    with begun():
        scaled = functional.scaled_dot_product_attention(query, key, value, dropout_p=0.5, **how)
    torch.testing.assert_close(scaled, 2 * whole, atol=1e-5, rtol=1e-5)
    assert all(bool(each.isfinite().all()) for each in torch.autograd.grad(scaled.sum(), (query, key, value)))


def test_attention_drops_probabilities() -> None:
    query = key = torch.zeros(1, 1, 64, 8)
    value = torch.eye(64).view(1, 1, 64, 64)
    with begun():
        seen = functional.scaled_dot_product_attention(query, key, value, dropout_p=0.5)
    assert torch.equal(seen[0, 0] > 0, begun().dropout(torch.ones(1, 1, 64, 64), 0.5)[0, 0] > 0)


# -- models


class Dropping(nn.Module):
    """Dropout behind a layer, and in attention."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        hidden = functional.dropout(self.first(x), 0.3, self.training)
        heads = hidden.unflatten(-1, (2, 4)).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.2 if self.training else 0.0)
        return functional.mse_loss(self.last(mixed.transpose(1, 2).flatten(-2)), target)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(self.last(x + torch.rand_like(x) * self.training), target)


def language_model(folder: Path, model_type: str, *, drops: bool = False) -> SpanSegment:
    config = tiny_config(model_type)
    for name in [
        name
        for name, value in vars(config).items()
        if drops and "drop" in name and "layer" not in name and value == 0.0
    ]:
        setattr(config, name, 0.1)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    checkpoint = Checkpoint(folder)
    return load_segment(checkpoint, 0, checkpoint.units)


def graph_of(net: nn.Module) -> GraphSegment:
    exported = export_module(net, {"x": torch.randn(2, 5, 8), "target": torch.randn(2, 5, 1)})
    return GraphSegment(exported.graph, exported.weights, 0, exported.graph.units)


def loss_of(segment: Segment, inputs: tuple[Tensor, ...], labels: tuple[Tensor, ...], seed: int) -> Tensor:
    torch.manual_seed(int(torch.seed()))  # whatever the generators stand at
    (loss,) = segment.forward(inputs, 0, segment.units, seed, labels)
    return loss.detach()


@pytest.mark.parametrize("model_type", ["gpt2", "opt"])
def test_a_language_models_dropout_asks_no_generator(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPT-2 drops inside attention, too. With generators that nobody seeds the loss is that of the seed all the same."""
    segment = language_model(tmp_path, model_type, drops=True)
    monkeypatch.setattr(lm, "reseed", lambda *_: None)
    ids_BT = torch.randint(0, 90, (2, 12), generator=torch.Generator().manual_seed(0))
    losses = [loss_of(segment, (ids_BT,), (ids_BT,), seed) for seed in (5, 5, 6)]
    assert torch.equal(losses[0], losses[1]) and not torch.equal(losses[0], losses[2])
    assert segment.is_portable


def test_a_graphs_dropout_asks_no_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    segment = graph_of(Dropping())
    monkeypatch.setattr(graph_segment, "reseed", lambda *_: None)
    x, target = (torch.randn(2, 5, size, generator=torch.Generator().manual_seed(size)) for size in (8, 1))
    losses = [loss_of(segment, (x, target), (), seed) for seed in (5, 5, 6)]
    assert torch.equal(losses[0], losses[1]) and not torch.equal(losses[0], losses[2])
    assert segment.is_portable


def test_a_graph_that_draws_noise_is_not_portable() -> None:
    """So nobody holds it against a replica on another device."""
    assert not graph_of(Noisy()).is_portable


def test_what_never_drops_is_left_to_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its functions are not looked at one by one."""
    monkeypatch.setattr(CounterDropout, "__enter__", lambda _: pytest.fail("entered"))
    segment = language_model(tmp_path, "llama")
    ids_BT = torch.zeros((2, 12), dtype=torch.int64)
    loss_of(segment, (ids_BT,), (ids_BT,), 1)
