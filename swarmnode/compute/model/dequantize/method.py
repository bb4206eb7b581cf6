"""The methods of quantisation that are known here, by the name in a config, and how each packs a matrix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from swarmnode.compute.model.checkpoint import TensorEntry
from swarmnode.compute.model.dequantize.bitsandbytes import STATES, dequantize_4bit, dequantize_int8
from swarmnode.compute.model.dequantize.fp8 import SCALES, dequantize_fp8
from swarmnode.compute.model.dequantize.int4 import AWQ_BITS, GPTQ_BITS, WORD_BITS, dequantize_awq, dequantize_gptq
from swarmnode.compute.model.dequantize.packed_matrix import PackedMatrix
from swarmnode.errors import CheckpointError

NESTED = (".nested_absmax", ".nested_quant_map")
ADVICE = "take the model's unquantised checkpoint, and --quantize nf4 on the volunteers to hold it small"


@dataclass(frozen=True)
class Method:
    """A packed tensor is known by the end of its name and its dtypes; those with the suffixes `beside` (in place of that end) are
    needed for it. `per_element`: how many numbers one element of it holds."""

    dtypes: tuple[str, ...]
    end: str
    plain_end: str
    beside: tuple[str, ...]
    per_element: float
    dequantize: Callable[[PackedMatrix], Tensor]

    def packs(self, name: str, entry: TensorEntry) -> bool:
        """Whether this tensor is a packed one."""
        return name.endswith(self.end) and entry.dtype in self.dtypes

    def stem(self, name: str) -> str:
        """What a packed tensor's name has in common with those beside it."""
        return name.removesuffix(self.end)


def method_of(settings: Mapping[str, Any]) -> Method:
    """By a config's quantization_config. Raises CheckpointError with the reason where it cannot be dequantised here."""
    name = str(settings.get("quant_method") or _bitsandbytes(settings) or "unknown")
    if name not in METHODS:
        raise CheckpointError(
            f"the checkpoint is quantised ({name}), and {', '.join(METHODS)} are what is dequantised here: {ADVICE}"
        )
    try:
        return METHODS[name](settings)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"the checkpoint's quantization_config ({name}) is damaged: {error}") from None


def _bitsandbytes(settings: Mapping[str, Any]) -> str | None:
    """Older ones do not name their method."""
    return "bitsandbytes" if settings.get("load_in_4bit") or settings.get("load_in_8bit") else None


def _of_gptq(settings: Mapping[str, Any]) -> Method:
    bits, form = settings.get("bits"), settings.get("checkpoint_format", "gptq")
    if bits not in GPTQ_BITS or form not in ("gptq", "gptq_v2"):
        raise CheckpointError(
            f"the checkpoint is GPTQ of {bits} bits in the format {form!r}, which is not read: {ADVICE}"
        )
    beside = (".qzeros", ".scales", ".g_idx")
    return Method(("I32",), ".qweight", ".weight", beside, WORD_BITS / bits, dequantize_gptq)


def _of_awq(settings: Mapping[str, Any]) -> Method:
    bits = settings.get("bits", settings.get("w_bit", AWQ_BITS))
    version = str(settings.get("version", "gemm")).lower()
    if bits != AWQ_BITS or version != "gemm":
        raise CheckpointError(f"the checkpoint is AWQ of {bits} bits, version {version}, which is not read: {ADVICE}")
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
