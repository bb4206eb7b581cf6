"""Tensor descriptors: the contents of a payload, in a few bytes of a frame's body (`protocol/tensors.md`).

A descriptor has the codec of the payload, dtype and shape of the tensor and, for top-k, the number of elements kept. The layout and
so the exact length of the payload follow from these.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import IntEnum

import msgspec

from swarmnode.errors import ErrorCode, ProtocolError, UsageError

AUTO = "auto"
COMPRESSIONS = (AUTO, "none", "bf16", "fp16", "int8", "int4")
MAX_RANK = 8
MAX_ELEMENTS = 1 << 31
LARGEST_VALUE = 2.0**32
"""Largest magnitude of a value that a neighbour sends. Products of two such values have squares that float32 can hold."""
INT8_GROUP = 64  # elements that share one scale
INT4_TILE = 32
INT2_GROUP = 64  # elements that share a scale
SCALE_BYTES = 2  # a bfloat16 scale: it has the range of float32, for tiny gradients and for outliers
TOPK_BLOCK = 1 << 16  # elements addressed by 16-bit indices
TOPK_COUNT_BYTES = 4
TOPK_INDEX_BYTES = 2
TOPK_VALUE_BYTES = 2
TOPK2_CHUNK = 4096  # elements that share two magnitudes
TOPK2_LEVEL_BYTES = 2  # of each magnitude, a bfloat16
TOPK2_BLOCK = 256  # elements addressed by indices of a byte


class Codec(IntEnum):
    """Encoding of a tensor's values in a message. The numbers are part of the protocol."""

    NONE = 0  # the tensor's own bytes, little-endian, row-major
    BF16 = 1
    FP16 = 2
    INT8 = 3  # block-wise absmax
    INT4 = 4  # tiles of 32, Hadamard for outlier tiles
    TOPK = 5  # values + bitmask or short indices
    TOPK2 = 7  # values of two bits + indices of a byte; 6 stays free: test vectors have it for an unknown one
    INT2 = 8  # four levels around zero, in groups of 64


PLAIN_CODECS = frozenset({Codec.NONE, Codec.FP16, Codec.BF16})  # each element has bytes of its own
SPARSE_CODECS = frozenset({Codec.TOPK, Codec.TOPK2})  # with a `param`: the number of elements kept


class DType(IntEnum):
    """Type of the elements of a decoded tensor. The numbers are part of the protocol."""

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
    """Descriptor of one payload. `param` is the codec's own parameter (top-k: elements kept), else 0."""

    codec: int
    dtype: int
    shape: tuple[int, ...]
    param: int = 0


def gradients_fit(gradients: Sequence[TensorInfo], present: Sequence[bool], sent: Sequence[TensorInfo]) -> bool:
    """Return whether `gradients` are those of the `present` ones of the values that were `sent`: floats of their shapes.

    The dtypes may differ, because passes in float16 return float32.
    """
    due = [info for info, there in zip(sent, present, strict=False) if there]
    floats = all(info.dtype in FLOAT_DTYPES for info in (*due, *gradients))
    return len(present) == len(sent) and [one.shape for one in gradients] == [one.shape for one in due] and floats


def element_count(shape: tuple[int, ...], max_elements: int = MAX_ELEMENTS) -> int:
    """Return the number of elements of a tensor of this shape. Raises ProtocolError: MALFORMED on a bad shape, TOO_LARGE over the
    bound."""
    if len(shape) > MAX_RANK:
        raise ProtocolError(f"a tensor has {len(shape)} dimensions; the bound is {MAX_RANK}")
    count = 1
    for size in shape:
        if size < 0:
            raise ProtocolError(f"a tensor has a negative dimension: {shape}")
        count *= size or 1  # the other sizes of an empty tensor are bounded, too
    if count > max_elements:
        raise ProtocolError(
            f"a tensor has {count} elements; the bound here is {max_elements}", code=ErrorCode.TOO_LARGE
        )
    return 0 if 0 in shape else count


def check_tensor(info: TensorInfo, max_elements: int = MAX_ELEMENTS) -> int:
    """Return the payload bytes that a peer's descriptor implies, after every check that needs no payload.

    Raises ProtocolError: MALFORMED if codec, dtype, shape or param are unknown or contradict one another, TOO_LARGE over
    `max_elements`.
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
    """Return the exact payload length that codec, dtype, shape and param imply. Raises ProtocolError on a bad descriptor."""
    return check_tensor(info)


def encoded_bytes(codec: int, dtype: int, count: int, param: int) -> int:
    """Return the payload bytes of `count` elements. The arguments must be valid; `check_tensor` is for a peer's."""
    if codec == Codec.INT8:
        return SCALE_BYTES * -(-count // INT8_GROUP) + count
    if codec == Codec.INT4:
        return (SCALE_BYTES + INT4_TILE // 2) * -(-count // INT4_TILE)
    if codec == Codec.INT2:
        return (SCALE_BYTES + INT2_GROUP // 4) * -(-count // INT2_GROUP)
    if codec == Codec.TOPK:
        return TOPK_VALUE_BYTES * param + min(topk_mask_bytes(count), topk_index_bytes(count, param))
    if codec == Codec.TOPK2:
        levels_bytes = 2 * TOPK2_LEVEL_BYTES * -(-count // TOPK2_CHUNK)
        return levels_bytes + -(-param // 4) + param + -(-count // TOPK2_BLOCK)
    return count * (DTYPE_BYTES[DType(dtype)] if codec == Codec.NONE else 2)


def topk_mask_bytes(count: int) -> int:
    """Return the bytes of a bitmask over `count` elements."""
    return -(-count // 8)


def topk_index_bytes(count: int, selected: int) -> int:
    """Return the bytes of short indices: the number of kept elements per block of 65,536, then a 16-bit index for each."""
    return TOPK_COUNT_BYTES * -(-count // TOPK_BLOCK) + TOPK_INDEX_BYTES * selected


def codec_named(compression: str) -> Codec:
    """Return the codec of a name of COMPRESSIONS; for "auto" NONE, the codec that hops begin with."""
    return Codec.NONE if compression == AUTO else Codec[compression.upper()]


def check_compression(compression: str, allowed: Collection[int]) -> None:
    """Raise UsageError if the swarm does not allow this compression, or it does not exist."""
    known = [name for name in COMPRESSIONS if name == AUTO or codec_named(name) in allowed]
    if compression not in known:
        raise UsageError(f"this swarm does not compress as {compression}: choose {', '.join(known)}")
