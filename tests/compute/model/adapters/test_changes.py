"""An adapter changes a layer in the same way, however the layer holds its matrix."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from swarmnode.compute.model.adapters.span_adapters import Lora, Whole, blocks_of, dora, moved_to, shapes_of, whole
from swarmnode.compute.model.linear import BlockedLinear, FbgemmLinear, TimedLinear, plain_linear
from swarmnode.compute.packing.ggml import FORMATS, library
from swarmnode.compute.packing.ggml_matrix import GgmlMatrix
from swarmnode.compute.packing.packed_weight import PackedWeight
from swarmnode.compute.packing.quantize import Int8Linear, _nf4_linear
from tests.compute.packing.test_packed_weight import packed_rows

INPUTS, OUTPUTS, RANK = 512, 64, 4
CPU = torch.device("cpu")
needs_ggml = pytest.mark.skipif(
    library() is None, reason="the package xllamacpp is not installed, or not for this machine"
)


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(INPUTS, OUTPUTS).requires_grad_(False)


def transposed() -> nn.Module:
    layer, like = Conv1D(OUTPUTS, INPUTS), linear()
    layer.weight.data, layer.bias.data = like.weight.t().contiguous(), like.bias.data
    return layer.requires_grad_(False)


def packed(form: str, *, exact: bool) -> nn.Module:
    layer = linear()
    rows_OB = packed_rows(form, layer.weight)
    weight = PackedWeight([GgmlMatrix(rows_OB, FORMATS[form], INPUTS, exact=exact)], torch.float32)
    del layer._parameters["weight"]
    layer.weight = weight  # type: ignore[assignment]
    return layer


def matrix_of(module: nn.Module) -> Tensor:
    """The matrix of a layer whose products are exact, by its products with unit vectors."""
    return (module(torch.eye(INPUTS)) - module.bias).t()  # type: ignore[operator]


HELD: dict[str, Callable[[], nn.Module]] = {
    "plain": linear,
    "transposed": transposed,
    "timed": lambda: TimedLinear(linear(), [plain_linear] * 6),
    "float16": lambda: FbgemmLinear(linear().weight, linear().bias),
    "blocks": lambda: BlockedLinear(linear().weight, linear().bias),
    "int8": lambda: Int8Linear(linear(), CPU),
}
PACKED = {f"{form} {name}": (form, name == "exact") for form in ("Q4_0", "Q4_1", "Q8_0") for name in ("exact", "fast")}


def check_magnitudes(module: nn.Module, weight_OI: Tensor) -> None:
    """Compare with W' = m (W + B A) / |W + B A| by rows, to 1e-5 of it."""
    generator = torch.Generator().manual_seed(1)
    a_RI, b_OR = torch.randn(RANK, INPUTS, generator=generator), torch.randn(OUTPUTS, RANK, generator=generator) * 0.01
    magnitude_O = torch.linspace(0.5, 2, OUTPUTS)
    gain_O, scaled_OR = dora(module, a_RI, b_OR, magnitude_O)
    changed_OI = weight_OI + b_OR @ a_RI
    wanted_OI = changed_OI * (magnitude_O / changed_OI.norm(dim=1))[:, None]
    found_OI = weight_OI * (1 + gain_O[:, None]) + scaled_OR @ a_RI
    assert float((found_OI - wanted_OI).abs().max()) < 1e-5 * float(wanted_OI.abs().max())


@pytest.mark.parametrize("held", HELD)
def test_magnitudes_are_those_of_the_layer_s_own_matrix(held: str) -> None:
    with torch.inference_mode():
        module = HELD[held]()
        check_magnitudes(module, matrix_of(module))


@needs_ggml
@pytest.mark.parametrize("held", PACKED)
def test_magnitudes_of_packed_matrices_are_exact_in_fast_products_too(held: str) -> None:
    form, exact = PACKED[held]
    with torch.inference_mode():
        check_magnitudes(packed(form, exact=exact), matrix_of(packed(form, exact=True)))


def check_way_back(module: nn.Module, weight_OI: Tensor) -> None:
    """The blocks are the matrix, and the gradient of the inputs is that of the product with it."""
    x_RI = torch.randn(5, INPUTS, generator=torch.Generator().manual_seed(2)).requires_grad_()
    blocks_OI = torch.zeros(OUTPUTS, INPUTS)
    for outputs, inputs, block in blocks_of(module):
        blocks_OI[outputs, inputs] += block
    assert float((blocks_OI - weight_OI).abs().max()) < 1e-5 * float(weight_OI.abs().max())
    y_RO = module(x_RI)
    gradient_RO = torch.randn(5, OUTPUTS, generator=torch.Generator().manual_seed(3))
    (found_RI,) = torch.autograd.grad(y_RO, x_RI, gradient_RO)
    assert float((found_RI - gradient_RO @ weight_OI).abs().max()) < 1e-5 * float(found_RI.abs().max())
    assert torch.equal(module(x_RI.detach()), y_RO.detach())


@pytest.mark.parametrize("held", [*HELD, "nf4"])
def test_gradients_pass_a_frozen_layer_however_it_holds_its_matrix(held: str) -> None:
    module = _nf4_linear(linear(), CPU) if held == "nf4" else HELD[held]()
    with torch.no_grad():
        weight_OI = matrix_of(module)
    check_way_back(module, weight_OI)


@needs_ggml
@pytest.mark.parametrize("held", PACKED)
def test_gradients_pass_packed_matrices(held: str) -> None:
    form, exact = PACKED[held]
    with torch.no_grad():
        weight_OI = matrix_of(packed(form, exact=True))
    check_way_back(packed(form, exact=exact), weight_OI)


def test_a_layer_s_bias_is_not_scaled() -> None:
    bias_O, y_TO = torch.tensor([1.0, -2.0]), torch.tensor([[3.0, 4.0]])
    lora = Lora(torch.zeros(1, 3), torch.zeros(2, 1), torch.tensor([0.5, -1.0]), bias_O)
    assert torch.equal(lora.add(torch.ones(1, 3), y_TO), torch.tensor([[1 + 1.5 * 2, -2.0]]))


@pytest.mark.parametrize("held", [*HELD, "packed"])
def test_a_replaced_layer_has_its_own_parameters_however_the_model_holds_its(held: str) -> None:
    if held == "packed" and library() is None:
        pytest.skip("the package xllamacpp is not installed, or not for this machine")
    with torch.inference_mode():
        module = packed("Q4_0", exact=False) if held == "packed" else HELD[held]()
        shapes = shapes_of(module)
        assert shapes == {
            "weight": (INPUTS, OUTPUTS) if held == "transposed" else (OUTPUTS, INPUTS),
            "bias": (OUTPUTS,),
        }
        weight_OI, bias_O, x = torch.randn(OUTPUTS, INPUTS), torch.randn(OUTPUTS), torch.randn(2, 3, INPUTS)
        change = whole(module, {"weight": weight_OI.t() if held == "transposed" else weight_OI, "bias": bias_O})
        before = module(x)
        assert torch.allclose(change.add(x, before), x @ weight_OI.t() + bias_O, atol=1e-4)
        assert torch.equal(module(x), before)


def test_parts_of_several_layers_cannot_be_replaced() -> None:
    assert shapes_of(nn.Sequential(linear())) is None
    assert shapes_of(nn.ReLU()) is None
    assert shapes_of(nn.GRUCell(2, 2)) is None


def test_changes_are_the_same_on_another_device_and_stay_where_they_were() -> None:
    torch.manual_seed(0)
    lora = Lora(torch.randn(2, 3), torch.randn(4, 2), torch.randn(4), torch.randn(4))
    own = whole(nn.Linear(3, 4), {"weight": torch.randn(4, 3), "bias": torch.randn(4)})
    x, y = torch.randn(5, 3), torch.randn(5, 4)
    changes = {"lora": lora, "own": own}
    for name, moved in moved_to(changes, torch.device("cpu")).items():
        assert torch.equal(moved.add(x, y), changes[name].add(x, y)), name
    elsewhere = moved_to(changes, torch.device("meta"))
    assert isinstance(elsewhere["lora"], Lora) and elsewhere["lora"].b_OR.is_meta
    assert isinstance(elsewhere["own"], Whole) and all(one.is_meta for one in elsewhere["own"].layer.parameters())
    assert not lora.b_OR.is_meta and not any(one.is_meta for one in own.layer.parameters())
