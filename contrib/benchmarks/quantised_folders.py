"""Quantised folders that stay packed, beside the same model in plain formats: one thread, no network. Prints JSON.

    python contrib/benchmarks/quantised_folders.py [KIND …] [--layers 2] [--rounds 5]

The model is a random Llama with the layers of a 1.1 B one. For each kind:

    held / file       bytes of the layers' matrices in memory / in the file.
    memory / held     (PSS after loading and a pass of 128 tokens - PSS before) / bytes of the loaded weights.
    load s per GB     seconds of CPU to load, for each GB of the file.
    ROWS rows         seconds of CPU of plain float32 and bfloat16 / those of the packed model, for passes of so many positions.
                      Passes take turns, ratios are medians: above 1, packed is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import psutil
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.span import ModelSpan
from swarmnode.compute.packing.packed_weight import held_by
from swarmnode.compute.serving.loading import load_span

GROUP, BLOCK = 64, 128
ROWS = (1, 8, 128)
SIZES = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32, "num_key_value_heads": 4}
Parts = dict[str, Tensor]


def words(values_VC: Tensor, bits: int) -> Tensor:
    """Return int32 words of `bits` for each value along dimension 0, the lowest first."""
    each = 32 // bits
    shifted = values_VC.long().unflatten(0, (-1, each)) << (torch.arange(each) * bits)[:, None]
    return shifted.sum(1).to(torch.int64).bitwise_and(0xFFFFFFFF).sub(1 << 32).to(torch.int32)


def rounded(weight_OI: Tensor, bits: int, *, zeros: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return values (O, I), zero points and scales (O, I / GROUP) in bfloat16."""
    groups = weight_OI.float().unflatten(1, (-1, GROUP))
    most, middle = (1 << bits) - 1, 1 << bits - 1
    if zeros:
        low, high = groups.amin(-1), groups.amax(-1)
        scales = ((high - low) / most).bfloat16()
        points = (-low / scales.float()).round().clamp(0, most)
    else:
        scales = (groups.abs().amax(-1) / (middle - 1)).bfloat16()
        points = torch.full_like(scales.float(), middle)
    values = (groups / scales.float()[..., None] + points[..., None]).round().clamp(0, most)
    return values.flatten(1), points, scales


def w4a16(weight_OI: Tensor, *, zeros: bool = False, scattered: bool = False) -> Parts:
    """Return the tensors of compressed-tensors with 4 bits."""
    values, points, scales = rounded(weight_OI, 4, zeros=zeros)
    parts = {"weight_packed": words(values.T, 4).T, "weight_scale": scales, "weight_shape": torch.tensor(values.shape)}
    if zeros:
        parts["weight_zero_point"] = words(points, 4)
    if scattered:
        parts["weight_g_idx"] = (torch.arange(values.shape[1]) // GROUP)[torch.randperm(values.shape[1])].int()
    return parts


def fp8(weight_OI: Tensor) -> Parts:
    """Return float8 numbers and scales of blocks."""
    blocks = weight_OI.float().unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    scales = blocks.abs().amax((1, 3)) / 448
    packed = (blocks / scales[:, None, :, None]).view(weight_OI.shape).to(torch.float8_e4m3fn)
    return {"weight": packed, "weight_scale_inv": scales}


def int8(weight_OI: Tensor) -> Parts:
    """Return int8 numbers and the largest value of each row."""
    largest = weight_OI.float().abs().amax(1)
    return {"weight": (weight_OI.float() / largest[:, None] * 127).round().to(torch.int8), "SCB": largest}


def nf4(weight_OI: Tensor) -> Parts:
    """Return bitsandbytes' 4 bits."""
    from bitsandbytes.functional import QuantState, quantize_4bit

    packed, state = quantize_4bit(weight_OI.clone(), quant_type="nf4")
    assert isinstance(state, QuantState)
    return {"weight": packed, **{f"weight.{key}": part for key, part in state.as_dict(packed=True).items()}}


def compressed(*, symmetric: bool) -> dict[str, Any]:
    """Return the quantization_config of 4 bits."""
    weights = {"num_bits": 4, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": GROUP}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


KINDS: Mapping[str, tuple[Callable[[Tensor], Parts], dict[str, Any]]] = {
    "w4a16": (w4a16, compressed(symmetric=True)),
    "w4a16 with zero points": (lambda weight: w4a16(weight, zeros=True), compressed(symmetric=False)),
    "w4a16 in another order": (lambda weight: w4a16(weight, scattered=True), compressed(symmetric=True)),
    "int8": (int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "fp8": (fp8, {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}),
    "nf4": (nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
}


def write_plain(folder: Path, layers: int) -> None:
    """Write a random Llama in bfloat16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(vocab_size=2048, num_hidden_layers=layers, **SIZES)
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)


def write_quantised(plain: Path, folder: Path, kind: str) -> None:
    """Write the model with its layers' matrices quantised."""
    quantise, settings = KINDS[kind]
    tensors = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        parts = quantise(tensor) if "proj" in name else {"weight": tensor}
        tensors |= {name.removesuffix("weight") + suffix: part.contiguous() for suffix, part in parts.items()}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    described = json.loads((plain / "config.json").read_text()) | {"quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(described))


def load(folder: Path, products: str, dtype: torch.dtype = torch.float32) -> ModelSpan:
    """Return the whole model."""
    checkpoint = Checkpoint(folder)
    return load_span(checkpoint, 0, checkpoint.units, dtype=dtype, products=products, check=False)


def cpu_s(span: ModelSpan, rows: int) -> float:
    """Return the seconds of CPU of a pass."""
    ids_BT = torch.arange(rows)[None] if rows > 8 else torch.arange(rows)[:, None]
    positions = torch.arange(ids_BT.shape[1])[None].expand(ids_BT.shape)
    began = time.process_time()
    with torch.inference_mode():
        span.forward(ids_BT, cache=None, position_ids=positions, keep_last=1)
    return time.process_time() - began


def measure_memory(folder: Path, products: str) -> dict[str, float]:
    """Return the growth of this process by loading and a pass, and the loaded weights' bytes."""
    process = psutil.Process()
    before = process.memory_full_info().pss
    span = load(folder, products)
    cpu_s(span, 128)
    return {"grown": process.memory_full_info().pss - before, "held": span.weight_bytes}


def measure(folder: Path, plain: Path, rounds: int) -> dict[str, Any]:
    """Return the figures of a quantised folder."""
    stored = sum(entry.nbytes for entry in Checkpoint(folder).entries.values() if entry.is_packed)
    began = time.process_time()
    spans = {"exact": load(folder, "exact")}
    load_s = time.process_time() - began
    spans |= {"fast": load(folder, "fast"), "float32": load(plain, "plain")}
    spans["bfloat16"] = load(plain, "plain", torch.bfloat16)
    held = sum(weight.nbytes for weight in held_by(spans["exact"].model))
    found: dict[str, Any] = {"held / file": round(held / stored, 3), "load s per GB": round(load_s / stored * 1e9, 1)}
    for rows in ROWS:
        turns = [{name: cpu_s(span, rows) for name, span in spans.items()} for _ in range(rounds + 1)][1:]
        found[f"{rows} rows"] = {
            f"{base} / {name}": round(statistics.median(turn[base] / turn[name] for turn in turns), 2)
            for name in ("exact", "fast")
            for base in ("float32", "bfloat16")
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", default=list(KINDS), metavar="KIND")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", nargs=2, metavar=("FOLDER", "PRODUCTS"), help="of this process")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.memory:
        print(json.dumps(measure_memory(Path(options.memory[0]), options.memory[1])))
        return
    found = {}
    with tempfile.TemporaryDirectory() as temporary:
        plain = Path(temporary) / "plain"
        write_plain(plain, options.layers)
        for kind in options.kinds:
            folder = Path(temporary) / kind.replace(" ", "-")
            write_quantised(plain, folder, kind)
            found[kind] = measure(folder, plain, options.rounds)
            done = subprocess.run(
                [sys.executable, __file__, "--memory", str(folder), "exact"], check=True, capture_output=True, text=True
            )
            memory = json.loads(done.stdout)
            found[kind]["memory / held"] = round(memory["grown"] / memory["held"], 2)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
