"""Quantised checkpoints made plain: matrices that were packed here come back, and what is damaged is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.checkpoint_writer import QuantisedCheckpoint, ShardWriter
from swarmnode.compute.model.family import settings_of
from swarmnode.compute.packing.quantisation_methods import AWQ_ORDER, unpack
from swarmnode.errors import CheckpointError
from tests.llama import save_llama

Packed = tuple[dict[str, Tensor], Tensor]  # the tensors by their suffixes, and the matrix that they stand for
GROUP = 32


def pack(values_VC: Tensor, bits: int) -> Tensor:
    """int32 words_WC of a stream of bits, one number of arbitrary size after the other."""
    columns = []
    for column in values_VC.T.tolist():
        stream = sum(value << (place * bits) for place, value in enumerate(column))
        words = [stream >> shift & 0xFFFFFFFF for shift in range(0, len(column) * bits, 32)]
        columns.append(torch.tensor([word - (1 << 32) if word >> 31 else word for word in words], dtype=torch.int32))
    return torch.stack(columns, 1)


def drawn(weight_OI: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """values_IO, zeros_GO, scales_GO of a matrix of this shape."""
    outputs, inputs = weight_OI.shape
    values = torch.randint(1 << bits, (inputs, outputs))
    zeros = torch.randint(1 << bits, (inputs // GROUP, outputs))
    return values, zeros, torch.rand(inputs // GROUP, outputs).half() / 16


def gptq(weight_OI: Tensor, bits: int = 4, *, shuffled: bool = False, stored_less: int = 1) -> Packed:
    values, zeros, scales = drawn(weight_OI, bits)
    group = torch.arange(len(values)) // GROUP
    group = group[torch.randperm(len(group))] if shuffled else group
    beside = {".qzeros": pack(((zeros - stored_less) % (1 << bits)).T, bits).T.contiguous(), ".scales": scales}
    order = {".g_idx": group.int()} if shuffled else {}
    plain = (values - zeros[group]) * scales[group].float()
    return {".qweight": pack(values, bits), **beside, **order}, plain.T


def awq(weight_OI: Tensor) -> Packed:
    values, zeros, scales = drawn(weight_OI, 4)
    order = torch.tensor([AWQ_ORDER.index(place) for place in range(8)])

    def packed(values_NO: Tensor) -> Tensor:
        return pack(values_NO.unflatten(1, (-1, 8))[:, :, order].flatten(1).T, 4).T.contiguous()

    plain = (values - zeros.repeat_interleave(GROUP, 0)) * scales.float().repeat_interleave(GROUP, 0)
    return {".qweight": packed(values), ".qzeros": packed(zeros), ".scales": scales}, plain.T


def fp8(weight_OI: Tensor) -> Packed:
    """In blocks of 48 x 48, which do not divide the matrix."""
    scales = torch.rand([-(-size // 48) for size in weight_OI.shape]) + 0.5
    of_each = scales.repeat_interleave(48, 0).repeat_interleave(48, 1)[: len(weight_OI), : weight_OI.shape[1]]
    packed = (weight_OI / of_each).to(torch.float8_e4m3fn)
    return {".weight": packed, ".weight_scale_inv": scales}, packed.float() * of_each


def fp8_rows(weight_OI: Tensor) -> Packed:
    scales = torch.rand(len(weight_OI), 1) + 0.5
    packed = (weight_OI / scales).to(torch.float8_e4m3fn)
    return {".weight": packed, ".weight_scale": scales}, packed.float() * scales


def nf4(weight_OI: Tensor, *, nested: bool = False) -> Packed:
    from bitsandbytes.functional import QuantState, dequantize_4bit, quantize_4bit  # brings torch's compiler

    packed, state = quantize_4bit(weight_OI.clone(), quant_type="nf4", compress_statistics=nested)
    assert isinstance(state, QuantState)
    plain = dequantize_4bit(packed, state)
    return {".weight": packed, **{f".weight.{key}": part for key, part in state.as_dict(packed=True).items()}}, plain


def int8(weight_OI: Tensor) -> Packed:
    largest = weight_OI.abs().amax(1)
    packed = (weight_OI / largest[:, None] * 127).round().to(torch.int8)
    return {".weight": packed, ".SCB": largest}, packed * largest[:, None] / 127


def gptq_symmetric(weight_OI: Tensor, bits: int, *, less: int = 1) -> Packed:
    """Zero points are stored less `less`."""
    values, _, scales = drawn(weight_OI, bits)
    middle = 1 << bits - 1
    zeros = torch.full((len(scales), len(weight_OI)), middle - less)
    plain = (values - middle) * scales.float().repeat_interleave(GROUP, 0)
    beside = {".qzeros": pack(zeros.T, bits).T.contiguous(), ".scales": scales}
    return {".qweight": pack(values, bits), **beside}, plain.T


def compressed(weight_OI: Tensor, bits: int = 4, *, zeros: bool = False, shuffled: bool = False) -> Packed:
    """pack-quantized of compressed-tensors, scales in bfloat16."""
    values, zero_points, scales = (part.T for part in drawn(weight_OI, bits))
    scales = scales.bfloat16()
    group = torch.arange(values.shape[1]) // GROUP
    group = group[torch.randperm(len(group))] if shuffled else group
    beside = {".weight_scale": scales, ".weight_shape": torch.tensor(weight_OI.shape)}
    beside |= {".weight_zero_point": pack(zero_points, bits)} if zeros else {}
    beside |= {".weight_g_idx": group.int()} if shuffled else {}
    offset = zero_points[:, group] if zeros else 1 << bits - 1
    return {".weight_packed": pack(values.T, bits).T, **beside}, (values - offset) * scales[:, group].float()


def compressed_bytes(weight_OI: Tensor) -> Packed:
    packed, plain = int8(weight_OI)
    scales = packed[".SCB"][:, None] / 127
    return {".weight": packed[".weight"], ".weight_scale": scales}, plain


def of_groups(form: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True, **weights}}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


W4A16 = of_groups("pack-quantized", num_bits=4, strategy="group", group_size=GROUP)
W4A16_ASYMMETRIC = of_groups("pack-quantized", num_bits=4, strategy="group", group_size=GROUP, symmetric=False)
W8A16 = of_groups("pack-quantized", num_bits=8, strategy="group", group_size=GROUP)
FP8_BLOCKS = of_groups("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[48, 48])


def fp8_blocks(weight_OI: Tensor) -> Packed:
    packed, plain = fp8(weight_OI)
    return {".weight": packed[".weight"], ".weight_scale": packed[".weight_scale_inv"]}, plain


METHODS: dict[str, tuple[Callable[[Tensor], Packed], dict[str, Any]]] = {
    "gptq-4": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP}),
    "gptq-3": (lambda weight: gptq(weight, 3), {"quant_method": "gptq", "bits": 3, "group_size": GROUP}),
    "gptq-8": (lambda weight: gptq(weight, 8), {"quant_method": "gptq", "bits": 8, "group_size": GROUP}),
    "gptq-ordered": (lambda weight: gptq(weight, shuffled=True), {"quant_method": "gptq", "bits": 4, "group_size": 32}),
    "gptq-symmetric": (lambda weight: gptq_symmetric(weight, 4), {"quant_method": "gptq", "bits": 4, "group_size": 32}),
    "gptq-symmetric-as-it-is": (
        lambda weight: gptq_symmetric(weight, 4, less=0),
        {"quant_method": "GPTQ", "bits": 4, "group_size": 32, "sym": True, "checkpoint_format": "gptq"},
    ),
    "gptq-2-symmetric": (
        lambda weight: gptq_symmetric(weight, 2),
        {"quant_method": "gptq", "bits": 2, "group_size": 32, "sym": True, "format": "gptq_v2", "desc_act": False},
    ),
    "gptq-v2": (
        lambda weight: gptq(weight, stored_less=0),
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "format": "GPTQ_V2", "meta": {"by": "x"}},
    ),
    "gptq-dynamic": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {"-:.*lm_head.*": {}}}),
    "gptq-8-symmetric": (
        lambda weight: gptq_symmetric(weight, 8),
        {"quant_method": "gptq", "bits": 8, "group_size": 32},
    ),
    "gptq-2": (lambda weight: gptq(weight, 2), {"quant_method": "gptq", "bits": 2, "group_size": GROUP}),
    "w4a16": (compressed, W4A16),
    "w4a16-zeros": (lambda weight: compressed(weight, zeros=True), W4A16_ASYMMETRIC),
    "w4a16-ordered": (lambda weight: compressed(weight, shuffled=True), W4A16),
    "w8a16": (lambda weight: compressed(weight, 8), W8A16),
    "w8a8": (compressed_bytes, of_groups("int-quantized", num_bits=8, strategy="channel")),
    "fp8-blocks": (fp8_blocks, FP8_BLOCKS),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}),
    "fp8": (fp8, {"quant_method": "fp8", "weight_block_size": [48, 48]}),
    "fp8-rows": (fp8_rows, {"quant_method": "compressed-tensors", "format": "float-quantized"}),
    "nf4": (nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "nf4-nested": (lambda weight: nf4(weight, nested=True), {"load_in_4bit": True}),
    "int8": (int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_llama(folder, layers=1)
    return folder


def quantise(llama: Path, folder: Path, method: str) -> dict[str, Tensor]:
    """Write the model with its layers' matrices packed; all tensors that it stands for."""
    torch.manual_seed(7)
    quantised: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    packing, settings = METHODS[method]
    for name, tensor in load_file(llama / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        if "proj" not in name or tensor.ndim != 2 or tensor.shape[0] % 8 or tensor.shape[1] % 32:
            quantised[name] = plain[name] = tensor
            continue
        parts, plain[name] = packing(tensor)
        quantised.update({stem + suffix: part.contiguous() for suffix, part in parts.items()})
    save(folder, quantised, json.loads((llama / "config.json").read_text()) | {"quantization_config": settings})
    return plain


def save(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")


def write_plain(folder: Path, out: Path) -> int:
    checkpoint = Checkpoint(folder)
    settings = settings_of(checkpoint.config)
    assert settings is not None
    source = QuantisedCheckpoint(checkpoint, settings)
    out.mkdir()
    source.write(out)
    return source.plain_bytes


@pytest.mark.parametrize("method", METHODS)
def test_packed_matrices_come_back(llama: Path, tmp_path: Path, method: str) -> None:
    expected = quantise(llama, tmp_path / "quantised", method)
    plain_bytes = write_plain(tmp_path / "quantised", tmp_path / "plain")
    plain = Checkpoint(tmp_path / "plain")
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    assert (tmp_path / "plain" / "tokenizer.json").is_file()
    assert plain.units == 3
    read = plain.read(plain.tensor_names)
    assert read.keys() == expected.keys()
    for name, tensor in read.items():
        torch.testing.assert_close(tensor, expected[name].to(tensor.dtype), rtol=1e-6, atol=1e-7)
    assert plain_bytes == sum(tensor.nbytes for tensor in read.values())


def test_values_may_lie_across_two_words() -> None:
    values = torch.randint(8, (64, 5), generator=torch.Generator().manual_seed(3))
    assert unpack(pack(values, 3), 3).equal(values)


PROJECTION = "model.layers.0.mlp.up_proj"


def without(suffix: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(PROJECTION + suffix)


def spoilt(suffix: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({PROJECTION + suffix: change(tensors[PROJECTION + suffix]).contiguous()})


@pytest.mark.parametrize(
    ("method", "spoil", "message"),
    [
        ("gptq-4", without(".scales"), "scales is missing"),
        ("gptq-4", without(".qweight"), "missing"),
        ("gptq-4", spoilt(".qzeros", lambda zeros: zeros[:, :-1]), "do not fit"),
        ("gptq-4", spoilt(".scales", lambda scales: scales * torch.nan), "no finite numbers"),
        ("gptq-ordered", spoilt(".g_idx", lambda group: group + 1000), "no scales"),
        ("gptq-3", spoilt(".qweight", lambda words: words[:-1]), "3 bits"),
        ("awq", spoilt(".qweight", lambda words: words.float()), "is missing"),
        ("fp8", without(".weight_scale_inv"), "scale_inv is missing"),
        ("fp8", spoilt(".weight_scale_inv", lambda scales: scales[:-1, :-1]), "do not fit"),
        ("nf4", without(".weight.absmax"), "absmax is missing"),
        ("nf4", spoilt(".weight.absmax", lambda scales: scales[:-1]), "not one for"),
        ("nf4", spoilt(".weight.quant_map", lambda table: table[:3]), "too short"),
        ("nf4", spoilt(".weight.quant_state.bitsandbytes__nf4", lambda state: state[:-5]), "quant_state is damaged"),
        ("nf4", spoilt(".weight", lambda words: words[:-1]), "does not hold a matrix"),
        ("int8", without(".SCB"), "SCB is missing"),
        ("gptq-symmetric-as-it-is", spoilt(".qzeros", lambda zeros: zeros + 1), "symmetric .sym., but its zero points"),
    ],
)
def test_damaged_ones_are_refused(
    llama: Path, tmp_path: Path, method: str, spoil: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    quantise(llama, tmp_path, method)
    tensors = load_file(tmp_path / "model.safetensors")
    spoil(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message) as caught:
        write_plain(tmp_path, tmp_path / "plain")
    assert "up_proj" in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "aqlm"}, "aqlm.*unquantised"),
        ({}, "unknown"),
        ({"quant_method": "gptq", "bits": 5}, "5 bits"),
        ({"quant_method": "gptq", "bits": [4]}, "bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "marlin"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "gemv"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "pack-quantized"),
        ({"quant_method": "fp8"}, "no tensor is"),
        ({"quant_method": "gptq", "bits": 4, "format": "gptq_v2", "checkpoint_format": "gptq"}, "format is 'gptq_v2'"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*down.*": {"bits": 8}}}, "layers like .*down"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": [8]}, "not a table"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "is_marlin_format: True"),
        ({"quant_method": "gptq", "bits": 4, "rotation": "hadamard"}, "rotation: hadamard"),
        ({"quant_method": "gptq", "bits": 4, "extra_config": {"lm_head": {"bits": 8}}}, "extra_config"),
        ({"quant_method": "awq", "bits": 4, "w_bit": 8}, "its w_bit is '?8"),
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "q_group_size": 64}, "its q_group_size"),
        ({"quant_method": "fp8", "weight_block_size": "128x128"}, r"blocks of '128x128'.*\[128, 128\]"),
        (of_groups("pack-quantized", num_bits=4) | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsely"),
    ],
)
def test_other_methods_are_refused_with_the_reason(llama: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        QuantisedCheckpoint(Checkpoint(llama), settings)


def test_shards_are_written_as_tensors_come(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, shard_bytes=100)
    tensors = {f"tensor{number}": torch.full((10,), float(number)) for number in range(5)}
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    writer.close()
    assert len(list(tmp_path.glob("model-0000?-of-00003.safetensors"))) == 3
    written = Checkpoint(tmp_path)
    read = written.read(written.tensor_names)
    assert read.keys() == tensors.keys() and all(read[name].equal(tensors[name]) for name in tensors)
