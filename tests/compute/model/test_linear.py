"""Ways to multiply: all come to the same, and the choice is by time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from torch import nn
from torch.nn import functional

from swarmnode.compute.model import linear
from swarmnode.compute.model.linear import (
    FORMS,
    TIMED_ROWS,
    BlockedLinear,
    PackedLinear,
    TimedLinear,
    packed_bytes,
    speed_up_linears,
)

INPUTS, OUTPUTS = 300, 260


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """What earlier tests have timed."""
    monkeypatch.setattr(linear, "_products", {})
    monkeypatch.setattr(linear, "_forms", {})


WAYS = (
    linear.weight_first_linear,
    linear.onednn_linear,
    linear.blocked_linear,
    linear.plain_linear,
    linear.tiled_linear,
)


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", [(1, 1, INPUTS), (1, INPUTS), (3, 2, INPUTS), (17, INPUTS)], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_all_ways_come_to_the_same(way: linear.Product, shape: tuple[int, ...], has_bias: bool) -> None:
    x, weight = drawn(*shape), drawn(OUTPUTS, INPUTS, seed=1)
    bias = drawn(OUTPUTS, seed=2) if has_bias else None
    torch.testing.assert_close(way(x, weight, bias), functional.linear(x, weight, bias), atol=1e-4, rtol=1e-4)
    assert torch.backends.mkldnn.enabled


@pytest.fixture(params=FORMS[torch.bfloat16], ids=lambda form: form.__name__)
def form(request: pytest.FixtureRequest) -> type[PackedLinear]:
    if not request.param.works(torch.bfloat16):
        pytest.skip("this torch cannot, or not on this CPU")
    chosen: type[PackedLinear] = request.param
    return chosen


@pytest.mark.parametrize("dtype", FORMS)
def test_a_form_works_for_each_dtype_that_it_says(dtype: torch.dtype) -> None:
    """A CPU may have products of one half precision, and not of the other."""
    weight, x = drawn(64, 32, dtype=dtype), drawn(3, 32, dtype=dtype, seed=1)
    for form in FORMS[dtype]:
        if form.works(dtype):
            torch.testing.assert_close(form(weight, None)(x), functional.linear(x, weight), atol=0.3, rtol=0.05)


@pytest.mark.parametrize("outputs", [1, 16, OUTPUTS])
@pytest.mark.parametrize("rows", [(1, 1), (4,), (2, 8), (100,)], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_blocks_of_float32_multiply_as_before(outputs: int, rows: tuple[int, ...], has_bias: bool) -> None:
    weight, x = drawn(outputs, INPUTS), drawn(*rows, INPUTS, seed=1)
    bias = nn.Parameter(drawn(outputs, seed=2)) if has_bias else None
    with torch.no_grad():
        y = BlockedLinear(weight, bias)(x)
        torch.testing.assert_close(y, functional.linear(x, weight, bias), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("has_bias", [False, True])
def test_packed_weights_lose_nothing(form: type[PackedLinear], scale: float, has_bias: bool) -> None:
    weight = drawn(OUTPUTS, INPUTS, dtype=torch.bfloat16, seed=1) * scale
    weight[0] = 0
    bias = nn.Parameter(drawn(OUTPUTS, dtype=torch.bfloat16)) if has_bias else None
    layer, x = form(weight, bias), drawn(3, 5, INPUTS, dtype=torch.bfloat16)
    expected = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    with torch.no_grad():
        y = layer(x)
    assert y.dtype is torch.bfloat16
    torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=scale * 1e-4)


class Two(nn.Module):
    """An embedding, a head that shares its matrix, and a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(OUTPUTS, INPUTS)
        self.head = nn.Linear(INPUTS, OUTPUTS, bias=False)
        self.head.weight = self.embedding.weight
        self.own = nn.Linear(INPUTS, OUTPUTS)
        self.tiny = nn.Linear(2, 2)


def test_what_is_packed_is_held_once_and_what_is_shared_stays(
    form: type[PackedLinear], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Two().to(torch.bfloat16)
    size, x = model.own.weight.nbytes, drawn(2, INPUTS, dtype=torch.bfloat16)
    with torch.no_grad():
        expected, logits = model.own(x), model.head(x)
    monkeypatch.setattr(linear, "_forms_to_pack", lambda weights, choices: {one.shape: form for one in weights})
    packing, later = speed_up_linears(model)
    assert not later
    packing.run(stopped=lambda: True)
    assert len(packing) == 1 and isinstance(model.own, nn.Linear)
    packing.run()
    assert not len(packing) and isinstance(model.own, form) and packed_bytes(model) == size
    assert model.head.weight is model.embedding.weight
    with torch.inference_mode():
        torch.testing.assert_close(model.own(x), expected)
        torch.testing.assert_close(model.head(x), logits)


def test_a_hook_outlives_timing_and_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter may come before or after either."""
    model, x = Two(), drawn(2, INPUTS)
    monkeypatch.setattr(
        linear, "_choose", lambda weights, others: {one.shape: [linear.blocked_linear] * 6 for one in weights}
    )
    monkeypatch.setattr(
        linear, "_forms_to_pack", lambda weights, choices: {one.shape: BlockedLinear for one in weights}
    )
    at_once, in_company = speed_up_linears(model)
    assert isinstance(model.own, TimedLinear) and not at_once and len(in_company) == 1
    model.own.register_forward_hook(lambda *_: torch.zeros(2, OUTPUTS))
    in_company.run()
    assert isinstance(model.own, BlockedLinear)
    with torch.no_grad():
        assert not model.own(x).any()


def test_the_faster_way_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "thread_time", lambda: now[0])
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def slow(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        now[0] += 2.0
        return functional.linear(x, weight, bias)

    def fast_for_few(x: torch.Tensor, weight: torch.Tensor, _bias: torch.Tensor | None) -> torch.Tensor:
        now[0] += 1.0 if len(x) <= 4 else 9.0
        return x @ weight.t()

    monkeypatch.setattr(linear, "USUAL", slow)
    monkeypatch.setattr(linear, "OTHERS", {torch.float32: (fast_for_few,)})
    model = Two()
    speed_up_linears(model)
    assert isinstance(model.own, TimedLinear)
    assert [product is fast_for_few for product in model.own.products] == [rows <= 4 for rows in TIMED_ROWS]
    assert type(model.tiny) is nn.Linear


def test_who_is_timed_first_pays_for_no_cold_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever meets a matrix first takes long: its pages are not mapped, nothing is in a cache."""
    now = [0.0]
    monkeypatch.setattr(time, "thread_time", lambda: now[0])
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    uses: Counter[int] = Counter()

    def multiply(x: torch.Tensor, weight: torch.Tensor, warm_s: float) -> torch.Tensor:
        uses[weight.data_ptr()] += 1
        now[0] += 5.0 if uses[weight.data_ptr()] <= 3 else warm_s
        return x @ weight.t()

    def usual(x: torch.Tensor, weight: torch.Tensor, _bias: torch.Tensor | None) -> torch.Tensor:
        return multiply(x, weight, 1.0)

    def other(x: torch.Tensor, weight: torch.Tensor, _bias: torch.Tensor | None) -> torch.Tensor:
        return multiply(x, weight, 1.25)

    monkeypatch.setattr(linear, "USUAL", usual)
    monkeypatch.setattr(linear, "OTHERS", {torch.float32: (other,)})
    model = Two()
    speed_up_linears(model)
    assert type(model.own) is nn.Linear and len(uses) > 1


def test_what_is_chosen_without_weights_holds_when_they_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[torch.Size] = []
    time_in_turns = linear._time_in_turns

    def noted(
        products: Sequence[linear.Product], sample: linear.Sample, rows: int, turns: int = 1
    ) -> dict[linear.Product, dict[torch.Size, float]]:
        timed.extend(sample)
        return time_in_turns(products, sample, rows, turns)

    monkeypatch.setattr(linear, "_time_in_turns", noted)
    with torch.device("meta"):
        outline = Two()
    assert not any(speed_up_linears(outline)) and timed
    timed.clear()
    model = Two()
    speed_up_linears(model)
    assert not timed and type(model.own) is type(outline.own)
