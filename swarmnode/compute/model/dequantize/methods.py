"""Methods of quantisation by their name in a config: how each packs a matrix, and the function that unpacks it."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from swarmnode.compute.model.packing.tensor_entry import TensorEntry
from swarmnode.errors import CheckpointError

NESTED = (".nested_absmax", ".nested_quant_map")
ADVICE = "take the model's unquantised checkpoint, and --quantize nf4 on the volunteers to hold it small"
STATES = (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")
INT8_LARGEST = 127
SCALES = ("_scale_inv", "_scale")  # under either name the factor that the numbers are multiplied by
WORD_BITS = 32
GPTQ_BITS = (2, 3, 4, 8)
AWQ_BITS = 4
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # place of columns 0, 1, … among a word's eight values


@dataclass(frozen=True)
class PackedMatrix:
    """Packed tensor `name` of a checkpoint, its companions by suffix (`beside`) and the quantization_config (`settings`)."""

    name: str
    packed: Tensor
    beside: Mapping[str, Tensor]
    settings: Mapping[str, Any]

    def __getitem__(self, suffix: str) -> Tensor:
        """Return the companion tensor with this suffix. Raises CheckpointError if the checkpoint lacks it."""
        if suffix not in self.beside:
            raise CheckpointError(
                f"{self.name} is quantised, but its {suffix.lstrip('._')} "
                "is missing in the checkpoint; fetch the checkpoint again"
            )
        return self.beside[suffix]

    def require(self, fits: bool, what: str) -> None:
        """Raise CheckpointError with `what` and the tensors' shapes, unless `fits`."""
        if not fits:
            shapes = {suffix.lstrip("._"): tuple(tensor.shape) for suffix, tensor in self.beside.items()}
            raise CheckpointError(f"{self.name} {tuple(self.packed.shape)}: {what} (beside it: {shapes})")


def unpack(words_WC: Tensor, bits: int) -> Tensor:
    """Return int64 values_VC of a stream of `bits` each, lowest bits first, along dimension 0; a value may lie across two words."""
    words = words_WC.long() & 0xFFFFFFFF
    following = torch.cat([words[1:], torch.zeros_like(words[:1])])
    first_bit = torch.arange(words.shape[0] * WORD_BITS // bits) * bits
    word, shift = first_bit // WORD_BITS, (first_bit % WORD_BITS)[:, None]
    return (words[word] >> shift | following[word] << (WORD_BITS - shift)) & ((1 << bits) - 1)


def dequantize_gptq(matrix: PackedMatrix) -> Tensor:
    """Return float32 weight_OI from qweight (packed along inputs), qzeros_GO (packed along outputs) and scales_GO.

    g_idx_I gives each input's group, if inputs are not in their groups' order. Version 1 stores zero points less one.
    """
    bits = int(matrix.settings["bits"])
    values_IO = _unpacked(matrix, matrix.packed, bits)
    zeros_GO = _unpacked(matrix, matrix[".qzeros"].mT, bits).mT
    if matrix.settings.get("checkpoint_format", "gptq") == "gptq":
        zeros_GO = (zeros_GO + 1) & ((1 << bits) - 1)
    return _scaled(matrix, values_IO, zeros_GO)


def dequantize_awq(matrix: PackedMatrix) -> Tensor:
    """Return float32 weight_OI from qweight_IO and qzeros_GO (both packed along outputs, in AWQ's own order) and scales_GO."""
    values_IO, zeros_GO = (
        _unpacked(matrix, packed.mT, AWQ_BITS).unflatten(0, (-1, 8))[:, list(AWQ_ORDER)].flatten(0, 1).mT
        for packed in (matrix.packed, matrix[".qzeros"])
    )
    return _scaled(matrix, values_IO, zeros_GO)


def _unpacked(matrix: PackedMatrix, words: Tensor, bits: int) -> Tensor:
    whole = words.dtype == torch.int32 and words.ndim == 2 and words.shape[0] * WORD_BITS % bits == 0
    matrix.require(whole, f"not a matrix of {bits} bits packed into int32")
    return unpack(words, bits)


def _scaled(matrix: PackedMatrix, values_IO: Tensor, zeros_GO: Tensor) -> Tensor:
    scales_GO = matrix[".scales"]
    inputs, outputs = values_IO.shape
    fits = scales_GO.shape == zeros_GO.shape and zeros_GO.ndim == 2 and zeros_GO.shape[1] == outputs
    matrix.require(fits and scales_GO.is_floating_point(), "scales and zero points do not fit the matrix")
    group_I = matrix.beside.get(".g_idx")
    if group_I is None:
        size = int(matrix.settings.get("group_size", -1))
        group_I = torch.arange(inputs) // (size if size > 0 else inputs)
    group_I = group_I.long()
    fits = group_I.shape == (inputs,) and int(group_I.min()) >= 0 and int(group_I.max()) < scales_GO.shape[0]
    matrix.require(fits, "its inputs are of groups that have no scales")
    return ((values_IO - zeros_GO[group_I]) * scales_GO[group_I].float()).mT


def dequantize_fp8(matrix: PackedMatrix) -> Tensor:
    """Return float32 weight_…OI from float8 numbers and their scales.

    A scale of fewer than two dimensions is the whole matrix's, or one for each row.
    """
    name = SCALES[1] if SCALES[1] in matrix.beside else SCALES[0]
    scale, weight = matrix[name], matrix.packed.float()
    matrix.require(scale.is_floating_point() and weight.ndim >= 2, f"its {name[1:]} is {scale.dtype}")
    scale = scale.float()
    if scale.ndim == 1 and scale.numel() > 1:
        scale = scale[:, None]
    while scale.ndim < weight.ndim:
        scale = scale[None]
    block = matrix.settings.get("weight_block_size")
    for dimension in range(weight.ndim):
        size, count = weight.shape[dimension], scale.shape[dimension]
        length = _block_length(block, dimension - weight.ndim, size, count)
        matrix.require(-(-size // length) == count, "its scales do not fit the matrix")
        scale = scale.repeat_interleave(length, dimension).narrow(dimension, 0, size)
    return weight * scale


def _block_length(block: object, dimension: int, size: int, count: int) -> int:
    """Return how many numbers of a dimension (-1 is the last) share a scale; the last block may be shorter."""
    if count in (1, size) or dimension < -2:
        return max(1, -(-size // max(count, 1)))
    if isinstance(block, list) and len(block) == 2 and all(isinstance(each, int) and each > 0 for each in block):
        return int(block[dimension])
    return -(-size // count)


def dequantize_int8(matrix: PackedMatrix) -> Tensor:
    """Return float32 weight_OI from int8 numbers and the largest absolute value SCB_O of each row."""
    largest_O = matrix[".SCB"].float()
    matrix.require(matrix.packed.ndim == 2 and largest_O.shape == matrix.packed.shape[:1], "its scales do not fit it")
    return matrix.packed.float() * largest_O[:, None] / INT8_LARGEST


def dequantize_4bit(matrix: PackedMatrix) -> Tensor:
    """Return the float32 weight from two indices in each byte, the first in the upper half. Scales may be quantised themselves."""
    state = _state(matrix)
    shape, block = [int(size) for size in state["shape"]], int(state["blocksize"])
    bytes_N = matrix.packed.flatten().long()
    count = math.prod(shape)
    matrix.require(count > 0 and block > 0 and -(-count // 2) == len(bytes_N), f"it does not hold a matrix {shape}")
    indices = torch.stack([bytes_N >> 4, bytes_N & 0xF], 1).flatten()[:count]
    scales = matrix[".absmax"]
    if ".nested_absmax" in matrix.beside:
        scales = _by_blocks(
            matrix, ".nested_quant_map", scales.long(), matrix[".nested_absmax"], int(state["nested_blocksize"])
        )
        scales = scales + float(state["nested_offset"])
    return _by_blocks(matrix, ".quant_map", indices, scales, block).reshape(shape)


def _by_blocks(matrix: PackedMatrix, table: str, indices: Tensor, scales: Tensor, block: int) -> Tensor:
    values = matrix[table].float()
    matrix.require(block > 0 and scales.is_floating_point(), "its scales are no numbers")
    matrix.require(values.ndim == 1 and int(indices.max()) < len(values), f"its {table[1:]} is too short")
    matrix.require(scales.shape == (-(-len(indices) // block),), f"its scales are not one for {block} numbers each")
    return values[indices] * scales.float().repeat_interleave(block)[: len(indices)]


def _state(matrix: PackedMatrix) -> dict[str, Any]:
    """Return the JSON object that is stored in the bytes of a tensor. Raises CheckpointError if it is missing or damaged."""
    raw = matrix[next((each for each in STATES if each in matrix.beside), STATES[0])]
    state = None
    with contextlib.suppress(ValueError, TypeError):
        state = json.loads(bytes(raw.tolist()))
    wanted = {"shape", "blocksize"} | (
        {"nested_blocksize", "nested_offset"} if ".nested_absmax" in matrix.beside else set()
    )
    matrix.require(isinstance(state, dict) and wanted <= state.keys(), "its quant_state is damaged")
    assert isinstance(state, dict)
    return state


@dataclass(frozen=True)
class Method:
    """Method of quantisation: how its packed tensors are recognised, completed and dequantised.

    A packed tensor has the end `end` in its name and one of `dtypes`. Its companions have a suffix of `beside` in place of that
    end, its plain weight `plain_end`. One packed element holds `per_element` numbers.
    """

    dtypes: tuple[str, ...]
    end: str
    plain_end: str
    beside: tuple[str, ...]
    per_element: float
    dequantize: Callable[[PackedMatrix], Tensor]

    def packs(self, name: str, entry: TensorEntry) -> bool:
        """Return whether the tensor `name` holds packed weights of this method, by its name's end and its dtype."""
        return name.endswith(self.end) and entry.dtype in self.dtypes

    def stem(self, name: str) -> str:
        """Return the part of a packed tensor's name that it shares with its companions."""
        return name.removesuffix(self.end)


def method_of(settings: Mapping[str, Any]) -> Method:
    """Return the method that a quantization_config names. Raises CheckpointError if it is damaged or not supported."""
    name = str(settings.get("quant_method") or _bitsandbytes(settings) or "unknown")
    if name not in METHODS:
        raise CheckpointError(
            f"the checkpoint is quantised ({name}), and only {', '.join(METHODS)} can be dequantised: {ADVICE}"
        )
    try:
        return METHODS[name](settings)
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"the checkpoint's quantization_config ({name}) is damaged: {error}; fetch config.json again"
        ) from None


def _bitsandbytes(settings: Mapping[str, Any]) -> str | None:
    """Return bitsandbytes for configs of its older versions, which do not name their method; None for others."""
    return "bitsandbytes" if settings.get("load_in_4bit") or settings.get("load_in_8bit") else None


def _of_gptq(settings: Mapping[str, Any]) -> Method:
    bits, form = settings.get("bits"), settings.get("checkpoint_format", "gptq")
    if bits not in GPTQ_BITS or form not in ("gptq", "gptq_v2"):
        raise CheckpointError(
            f"the checkpoint is GPTQ of {bits} bits in the format {form!r}, which is not supported: {ADVICE}"
        )
    beside = (".qzeros", ".scales", ".g_idx")
    return Method(("I32",), ".qweight", ".weight", beside, WORD_BITS / bits, dequantize_gptq)


def _of_awq(settings: Mapping[str, Any]) -> Method:
    bits = settings.get("bits", settings.get("w_bit", AWQ_BITS))
    version = str(settings.get("version", "gemm")).lower()
    if bits != AWQ_BITS or version != "gemm":
        raise CheckpointError(
            f"the checkpoint is AWQ of {bits} bits, version {version}, which is not supported: {ADVICE}"
        )
    return Method(("I32",), ".qweight", ".weight", (".qzeros", ".scales"), WORD_BITS / AWQ_BITS, dequantize_awq)


def _of_bitsandbytes(settings: Mapping[str, Any]) -> Method:
    if settings.get("load_in_8bit"):
        return Method(("I8",), ".weight", ".weight", (".SCB", ".weight_format"), 1, dequantize_int8)
    return Method(("U8",), "", "", (".absmax", ".quant_map", *NESTED, *STATES), 2, dequantize_4bit)


def _of_fp8(_settings: Mapping[str, Any]) -> Method:
    return Method(("F8_E4M3", "F8_E5M2"), "", "", SCALES, 1, dequantize_fp8)


def _of_compressed_tensors(settings: Mapping[str, Any]) -> Method:
    if settings.get("format") != "float-quantized":
        form = settings.get("format")
        raise CheckpointError(f"the checkpoint is of compressed-tensors in the format {form!r}, not FP8: {ADVICE}")
    return _of_fp8(settings)


METHODS: dict[str, Callable[[Mapping[str, Any]], Method]] = {
    "gptq": _of_gptq,
    "awq": _of_awq,
    "bitsandbytes": _of_bitsandbytes,
    "fp8": _of_fp8,
    "fbgemm_fp8": _of_fp8,
    "compressed-tensors": _of_compressed_tensors,
}
