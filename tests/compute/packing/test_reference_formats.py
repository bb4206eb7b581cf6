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
from swarmnode.errors import CheckpointError
from tests.compute.packing.test_dequantize import save, write_plain
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


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu, torch.uint8])
@pytest.mark.parametrize("block", [(16, 16), (32, 8), (8, 32)])
def test_blocks_of_float8_are_those_of_transformers(
    tmp_path: Path, dtype: torch.dtype, scales: torch.dtype, block: tuple[int, int]
) -> None:
    """Scales of one byte are exponents of two; 255 is no number."""
    reference = pytest.importorskip("transformers.integrations.finegrained_fp8", reason="transformers unpacks float8")
    unpack = reference.Fp8Dequantize(None)._dequantize_one
    generator = torch.Generator().manual_seed(3)
    save_llama(tmp_path / "model", layers=1)
    stored: dict[str, Tensor] = {}
    wanted: dict[str, Tensor] = {}
    for name, tensor in load_file(tmp_path / "model" / "model.safetensors").items():
        if "proj" not in name:
            stored[name] = wanted[name] = tensor
            continue
        rows, columns = (size // part for size, part in zip(tensor.shape, block, strict=True))
        scale = torch.exp2(torch.randint(-9, -2, (rows, columns), generator=generator).float())
        if scales is torch.float32 or scales is torch.bfloat16:
            scale = (scale * (1 + torch.rand(scale.shape, generator=generator))).to(scales)
        else:
            scale = scale.to(torch.float8_e8m0fnu).view(scales)
        stored[name] = (tensor / tensor.abs().amax() * 400).to(dtype)
        stored[f"{name}_scale_inv"] = scale
        wanted[name] = unpack(stored[name], scale, torch.float32)
    config: dict[str, Any] = json.loads((tmp_path / "model" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": list(block)}
    save(tmp_path / "packed", stored, config)
    write_plain(tmp_path / "packed", tmp_path / "plain")
    plain = Checkpoint(tmp_path / "plain")
    for name, tensor in plain.read(plain.tensor_names).items():
        torch.testing.assert_close(tensor, wanted[name].to(tensor.dtype), rtol=1e-6, atol=1e-7)
    if scales.itemsize == 1:
        packed = "model.layers.0.mlp.up_proj.weight_scale_inv"
        save(tmp_path / "packed", {**stored, packed: stored[packed].view(torch.uint8).fill_(255).view(scales)}, config)
        with pytest.raises(CheckpointError, match="no finite numbers"):
            write_plain(tmp_path / "packed", tmp_path / "damaged")
