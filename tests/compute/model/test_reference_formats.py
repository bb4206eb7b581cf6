"""Quantised matrices beside the packages of their formats: compressed-tensors packs and unpacks, transformers unpacks MXFP4."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from swarmnode.compute.model.checkpoint import Checkpoint
from tests.compute.model.test_dequantize import save, write_plain
from tests.llama import save_llama

CASES = [
    (form, bits, strategy, symmetric)
    for form, bits, strategy, symmetric in itertools.product(
        ("pack-quantized", "int-quantized", "float-quantized"), (4, 8), ("group", "channel"), (True, False)
    )
    if form == "pack-quantized" or (bits == 8 and strategy == "channel" and (symmetric or form == "int-quantized"))
]


@pytest.mark.parametrize(("form", "bits", "strategy", "symmetric"), CASES)
def test_matrices_are_those_of_compressed_tensors(
    tmp_path: Path, form: str, bits: int, strategy: str, symmetric: bool
) -> None:
    reason = "compressed-tensors packs and unpacks its own formats (pip install compressed-tensors)"
    theirs = pytest.importorskip("compressed_tensors.compressors", reason=reason)
    settings = pytest.importorskip("compressed_tensors.quantization", reason=reason)
    torch.manual_seed(bits)
    weights = {
        "num_bits": bits,
        "type": "float" if form == "float-quantized" else "int",
        "strategy": strategy,
        "symmetric": symmetric,
        "group_size": 32 if strategy == "group" else None,
    }
    scheme = settings.QuantizationScheme(targets=["Linear"], weights=settings.QuantizationArgs(**weights), format=form)
    compressor = theirs.BaseCompressor.get_value_from_registry(form)
    save_llama(tmp_path / "model", layers=1)
    stored: dict[str, Tensor] = {}
    wanted: dict[str, Tensor] = {}
    for name, tensor in load_file(tmp_path / "model" / "model.safetensors").items():
        stem, is_packed = name.removesuffix("weight"), "proj" in name
        if not is_packed:
            stored[name] = wanted[name] = tensor
            continue
        groups = tensor.shape[1] // 32 if strategy == "group" else 1
        scale = (
            tensor.abs().amax()
            / (100 if form == "float-quantized" else 1 << (bits - 1))
            * (0.5 + torch.rand(len(tensor), groups))
        )
        zero = (
            torch.randint(-3, 4, scale.shape, dtype=torch.int8)
            if not symmetric
            else torch.zeros(scale.shape, dtype=torch.int8)
        )
        parts = compressor.compress({"weight": tensor, "weight_scale": scale, "weight_zero_point": zero}, scheme)
        wanted[name] = compressor.decompress(dict(parts), scheme)["weight"]
        stored |= {stem + part: value.contiguous() for part, value in parts.items()}
    config: dict[str, Any] = json.loads((tmp_path / "model" / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    save(tmp_path / "packed", stored, config)
    write_plain(tmp_path / "packed", tmp_path / "plain")
    plain = Checkpoint(tmp_path / "plain")
    for name, tensor in plain.read(plain.tensor_names).items():
        torch.testing.assert_close(tensor, wanted[name].to(tensor.dtype), rtol=1e-6, atol=1e-7)
