"""Tensor descriptors: what a payload is, in a few bytes of a frame's body (`protocol/tensors.md`).

A descriptor says how the payload was made (codec), what it becomes (dtype and shape) and, for top-k, how many elements
are kept; the layout of each codec's payload, and so its exact length, follows from these.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import IntEnum

import msgspec

from swarmnode.errors import ErrorCode, ProtocolError, UsageError

AUTO = "auto"
COMPRESSIONS = (AUTO, "none", "bf16", "fp16", "int8", "int4")
MAX_RANK = 8
MAX_ELEMENTS = 1 << 31
INT8_GROUP = 64  # elements that share one scale
INT4_TILE = 32
SCALE_BYTES = 2  # a bfloat16 scale: the range of float32, so that neither tiny gradients nor outliers leave it
TOPK_BLOCK = 1 << 16  # elements that 16-bit indices can tell apart
TOPK_COUNT_BYTES = 4
TOPK_INDEX_BYTES = 2
TOPK_VALUE_BYTES = 2
TOPK2_CHUNK = 4096  # elements that share two magnitudes
TOPK2_LEVEL_BYTES = 2  # of each of them, a bfloat16
TOPK2_BLOCK = 256  # elements that indices of a byte can tell apart


class Codec(IntEnum):
    """How a payload was made."""

    NONE = 0  # the tensor's own bytes, little-endian, row-major
    BF16 = 1
    FP16 = 2
    INT8 = 3  # block-wise absmax
    INT4 = 4  # tiles of 32, Hadamard for outlier tiles
    TOPK = 5  # values + bitmask or short indices
    TOPK2 = 7  # values of two bits + indices of a byte; 6 stays free: test vectors have it for an unknown one


SPARSE_CODECS = frozenset({Codec.TOPK, Codec.TOPK2})  # those with a `param`: how many elements are kept


class DType(IntEnum):
    """What the decoded tensor is."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2
    INT64 = 3
    INT32 = 4
    UINT8 = 5


DTYPE_BYTES = {DType.FLOAT32: 4, DType.BFLOAT16: 2, DType.FLOAT16: 2, DType.INT64: 8, DType.INT32: 4, DType.UINT8: 1}
FLOAT_DTYPES = frozenset({DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16})
ID_DTYPES = frozenset({DType.INT64, DType.INT32})  # token ids


class TensorInfo(msgspec.Struct, array_like=True, frozen=True):
    """Descriptor of one payload. `param` is the codec's own parameter (top-k: elements kept), 0 where it has none."""

    codec: int
    dtype: int
    shape: tuple[int, ...]
    param: int = 0


def element_count(shape: tuple[int, ...], max_elements: int = MAX_ELEMENTS) -> int:
    """Elements of a tensor of this shape. Raises ProtocolError: MALFORMED on a bad shape, TOO_LARGE over the bound."""
    if len(shape) > MAX_RANK:
        raise ProtocolError(f"a tensor has {len(shape)} dimensions; the bound is {MAX_RANK}")
    count = 1
    for size in shape:
        if size < 0:
            raise ProtocolError(f"a tensor has a negative dimension: {shape}")
        count *= size or 1  # an empty tensor may not have sizes past what can be addressed either
    if count > max_elements:
        raise ProtocolError(
            f"a tensor has {count} elements; the bound here is {max_elements}", code=ErrorCode.TOO_LARGE
        )
    return 0 if 0 in shape else count


def check_tensor(info: TensorInfo, max_elements: int = MAX_ELEMENTS) -> int:
    """The payload bytes that a peer's descriptor implies, after every check that needs no payload.

    Raises ProtocolError: MALFORMED where codec, dtype, shape or param are not in the tables or do not fit one another,
    TOO_LARGE over `max_elements`.
    """
    count = element_count(info.shape, max_elements)
    width = DTYPE_BYTES.get(info.dtype)  # type: ignore[call-overload]
    if width is None:
        raise ProtocolError(f"unknown tensor dtype {info.dtype}")
    if info.codec == Codec.NONE and info.param == 0:
        return count * int(width)
    if info.codec not in Codec._value2member_map_:
        raise ProtocolError(f"unknown tensor codec {info.codec}")
    if info.codec != Codec.NONE and info.dtype not in FLOAT_DTYPES:
        raise ProtocolError(f"codec {Codec(info.codec).name} cannot carry {DType(info.dtype).name}")
    if not 0 <= info.param <= (count if info.codec in SPARSE_CODECS else 0):
        raise ProtocolError(f"param {info.param} does not fit codec {Codec(info.codec).name} of {count} elements")
    return encoded_bytes(info.codec, info.dtype, count, info.param)


def payload_bytes(info: TensorInfo) -> int:
    """The exact payload length that codec, dtype, shape and param imply. Raises ProtocolError on a bad descriptor."""
    return check_tensor(info)


def encoded_bytes(codec: int, dtype: int, count: int, param: int) -> int:
    """Payload bytes of `count` elements. The arguments must be valid; `check_tensor` is for those of a peer."""
    if codec == Codec.INT8:
        return SCALE_BYTES * -(-count // INT8_GROUP) + count
    if codec == Codec.INT4:
        return (SCALE_BYTES + INT4_TILE // 2) * -(-count // INT4_TILE)
    if codec == Codec.TOPK:
        return TOPK_VALUE_BYTES * param + min(topk_mask_bytes(count), topk_index_bytes(count, param))
    if codec == Codec.TOPK2:
        levels_bytes = 2 * TOPK2_LEVEL_BYTES * -(-count // TOPK2_CHUNK)
        return levels_bytes + -(-param // 4) + param + -(-count // TOPK2_BLOCK)
    return count * (DTYPE_BYTES[DType(dtype)] if codec == Codec.NONE else 2)


def topk_mask_bytes(count: int) -> int:
    """Bytes of a bitmask over `count` elements."""
    return -(-count // 8)


def topk_index_bytes(count: int, kept: int) -> int:
    """Bytes of short indices: per block of 65,536 elements how many are kept, then one 16-bit index for each."""
    return TOPK_COUNT_BYTES * -(-count // TOPK_BLOCK) + TOPK_INDEX_BYTES * kept


def codec_named(compression: str) -> Codec:
    """The codec of one of COMPRESSIONS; where hops choose, the one that they begin with."""
    return Codec.NONE if compression == AUTO else Codec[compression.upper()]


def check_compression(compression: str, allowed: Collection[int]) -> None:
    """Raises UsageError where a swarm does not allow it, or nobody knows it."""
    known = [name for name in COMPRESSIONS if name == AUTO or codec_named(name) in allowed]
    if compression not in known:
        raise UsageError(f"this swarm does not compress as {compression}: choose {', '.join(known)}")
