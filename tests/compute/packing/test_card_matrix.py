"""Packed matrices of cards: their values are ggml's to the bit, and their products those of the dequantised matrix."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from swarmnode.compute.packing.block_values import values_of
from swarmnode.compute.packing.card_matrix import FEW_ROWS, TORCH_ELEMENTS, CardMatrix, kernels
from swarmnode.compute.packing.ggml import FORMATS
from tests.compute.packing.interpreted_kernels import random_rows

CPU = torch.device("cpu")
ORDER = 2e-6  # another order of float sums
BLOCKS = 300


@pytest.mark.parametrize("name", FORMATS)
def test_values_are_those_of_gguf_to_the_bit(name: str) -> None:
    """Scales of NaN and infinity are among them."""
    form = FORMATS[name]
    random = torch.Generator().manual_seed(1)
    packed_NB = torch.randint(0, 256, (BLOCKS, form.block_bytes), dtype=torch.uint8, generator=random)
    values_M = values_of(packed_NB.view(-1), form)
    with np.errstate(all="ignore"):
        told: Any = gguf.dequantize(packed_NB.numpy(), gguf.GGMLQuantizationType[name])
    expected_M = torch.from_numpy(np.copy(told)).view(-1)
    assert torch.equal(values_M.isnan(), expected_M.isnan())
    sound_M = ~expected_M.isnan()
    assert torch.equal(values_M[sound_M].view(torch.int32), expected_M[sound_M].view(torch.int32))
    assert sound_M.any() and (not sound_M.all() or name != "Q4_0"), "some scale is NaN"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FORMATS)
def test_products_are_the_dequantised_ones_in_the_models_dtype(name: str, dtype: torch.dtype) -> None:
    form, outputs, inputs = FORMATS[name], 37, 512
    packed_OB = random_rows(form, outputs, inputs)
    plain_OI = values_of(packed_OB.view(-1), form).view(outputs, inputs).to(dtype)
    matrix = CardMatrix(packed_OB, form, inputs, dtype, CPU)
    assert torch.equal(matrix.rows(torch.tensor([5, 0, 5])), plain_OI[[5, 0, 5]])
    x_RI = torch.randn(FEW_ROWS + 3, inputs, generator=torch.Generator().manual_seed(2)).to(dtype)
    assert torch.equal(matrix.multiply(x_RI), torch.nn.functional.linear(x_RI, plain_OI))
    with pytest.raises(ValueError, match=f"width {inputs}"):
        matrix.multiply(x_RI[:, :-1])
    with pytest.raises(ValueError, match=str(dtype)):
        matrix.multiply(x_RI.double())


def test_a_large_matrix_is_dequantised_in_parts() -> None:
    form, inputs = FORMATS["Q4_K"], 1024
    outputs = TORCH_ELEMENTS // inputs + 5
    packed_OB = random_rows(form, 5, inputs).repeat(outputs // 5 + 1, 1)[:outputs]
    values_OI = values_of(packed_OB.reshape(-1), form).view(outputs, inputs)
    x_RI = torch.randn(3, inputs, generator=torch.Generator().manual_seed(2))
    y_RO = CardMatrix(packed_OB, form, inputs, torch.float32, CPU).multiply(x_RI)
    wanted_RO = x_RI.double() @ values_OI.double().t()
    assert float((y_RO - wanted_RO).abs().max()) < ORDER * float(wanted_RO.abs().max())


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the package triton is not installed")
def test_kernels_compute_the_same() -> None:
    """Triton's interpreter computes some formats here; `python -m tests.compute.packing.interpreted_kernels` takes all."""
    names = ["Q4_1", "Q6_K", "Q4_K", "MXFP4"]
    command = [sys.executable, "-m", "tests.compute.packing.interpreted_kernels", *names]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for name, found in json.loads(done.stdout).items():
        assert found["values"] and found["alone"] and found["error"] < ORDER, (name, found)


def test_a_cpu_has_no_kernels() -> None:
    assert kernels(CPU) is None
