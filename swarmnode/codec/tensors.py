"""Tensor descriptors: what a payload is, in a few bytes of a frame's body (`protocol/tensors.md`).

A descriptor says how the payload was made (codec), what it becomes (dtype and shape) and nothing else; the layout of each
codec's payload, and so its exact length, follows from these three.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec

MAX_RANK = 8
MAX_ELEMENTS = 1 << 31


class Codec(IntEnum):
    """How a payload was made."""

    NONE = 0  # the tensor's own bytes, little-endian, row-major
    BF16 = 1
    FP16 = 2
    INT8 = 3  # block-wise absmax
    INT4 = 4  # tiles of 32, Hadamard for outlier tiles
    TOPK = 5  # values + bitmask or short indices


class DType(IntEnum):
    """What the decoded tensor is."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2
    INT64 = 3
    INT32 = 4
    UINT8 = 5


DTYPE_BYTES = {DType.FLOAT32: 4, DType.BFLOAT16: 2, DType.FLOAT16: 2, DType.INT64: 8, DType.INT32: 4, DType.UINT8: 1}


class TensorInfo(msgspec.Struct, array_like=True, frozen=True):
    """Descriptor of one payload. `param` is the codec's own parameter (top-k: elements kept), 0 where it has none."""

    codec: int
    dtype: int
    shape: tuple[int, ...]
    param: int = 0
