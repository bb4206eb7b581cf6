"""Block-wise codecs: int8 in groups of 64, int4 in tiles of 32 with a Hadamard transform for outliers, int2 in groups of 64, and
their common parts.

Each row of a scale is one group. Work on the CPU goes in pieces that stay in its cache.

Shape letters: N elements, M payload bytes, G groups (rows with one scale), W elements of a group, C bytes of a group's codes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from swarmnode.codec.tensors import INT2_GROUP, INT4_TILE, INT8_GROUP, SCALE_BYTES

MOST_ELEMENTS = 1 << 14  # largest tensor for numpy: beyond, torch is as fast
LEVELS = 127
INT4_LEVELS = 7
ZERO_CODE = 8  # codes are 8 + (-7..7), so that two of them fill a byte without sign extension
OUTLIER_RATIO = 5.0  # largest magnitude to mean magnitude: normal values have 2.7, and one tile in 400 exceeds 5
CODE_BYTES = INT4_TILE // 2
INT2_LEVELS = 4  # int2 scales in the largest magnitude: each element is within one scale of a level
PIECE_ELEMENTS = 1 << 18  # 1 MiB of float32: pieces of 2**13, or 2**24 at once, are 3 to 4 times slower
SMALLEST_SCALE = 2.0**-126  # the smallest normal number: an all-zero group divides by it like any other


def rows_of(x_N: Tensor, width: int) -> Tensor:
    """Return x_GW: the elements as rows of `width`, the last one padded with zeros."""
    missing = -x_N.numel() % width
    return (pad(x_N, (0, missing)) if missing else x_N).view(-1, width)


def in_pieces(work: Callable[..., object], *tensors_GW: Tensor) -> None:
    """Call work(*pieces) for pieces of the same rows of all tensors; once for all rows on an accelerator (launches cost)."""
    first_GW = tensors_GW[0]
    rows = PIECE_ELEMENTS // first_GW.shape[1]
    if first_GW.shape[0] <= rows or first_GW.device.type != "cpu":
        work(*tensors_GW)
        return
    for pieces in zip(*(torch.split(tensor, rows) for tensor in tensors_GW), strict=True):
        work(*pieces)


def magnitudes(x_GW: Tensor) -> Tensor:
    """Return the magnitudes float32_GW, in new memory that may be overwritten."""
    return x_GW.abs() if x_GW.dtype == torch.float32 else x_GW.float().abs_()


def write_scales(peaks_G1: Tensor, levels: int, scales_G1: Tensor) -> Tensor:
    """Write one bfloat16 scale per group from the largest magnitudes float32_G1; return the factors for the elements.

    Rounding moves a scale by at most 2**-8, so for at most 127 levels no code needs clamping: 127 (1 + 2**-8) < 127.5. NaN and
    infinity stay NaN and infinity. Overwrites `peaks_G1`.
    """
    scales_G1.copy_(peaks_G1.mul_(1 / levels).clamp_min_(SMALLEST_SCALE))
    return peaks_G1.copy_(scales_G1).reciprocal_()


def scales_and_codes(payload_M: Tensor, groups: int) -> list[Tensor]:
    """Return views of the payload: its scales bfloat16_G1, which come first, and the bytes of its codes uint8_GC."""
    scales_S, codes_C = payload_M.split_with_sizes((groups * SCALE_BYTES, payload_M.numel() - groups * SCALE_BYTES))
    return [scales_S.view(torch.bfloat16).view(groups, 1), codes_C.view(groups, -1)]


def encode_int4(x_N: Tensor) -> Tensor:
    """Return the payload uint8_M on x's device: scales bfloat16_G, then 16 bytes of codes for each tile."""
    x_GW = rows_of(x_N, INT4_TILE)
    groups = x_GW.shape[0]
    payload_M = torch.empty(groups * (SCALE_BYTES + CODE_BYTES), dtype=torch.uint8, device=x_N.device)
    scales_G1, codes_GC = scales_and_codes(payload_M, groups)
    outlier_G1 = torch.empty(groups, 1, dtype=torch.bool, device=x_N.device)
    in_pieces(_encode_tiles, x_GW, scales_G1, codes_GC, outlier_G1)
    tiles_T = outlier_G1.view(-1).nonzero().view(-1)
    if tiles_T.numel():
        # Encode the outlier tiles again after a Hadamard rotation, where that makes their scale smaller.
        rotated_TW = x_GW[tiles_T].float() @ _hadamard(x_GW.device)
        scale_T1 = scales_G1[tiles_T]
        rotated_scale_T1 = torch.empty_like(scale_T1)
        inverse_T1 = write_scales(rotated_TW.abs().amax(1, keepdim=True), INT4_LEVELS, rotated_scale_T1)
        better_T1 = rotated_scale_T1 < scale_T1
        codes_GC[tiles_T] = torch.where(better_T1, _codes(rotated_TW.mul_(inverse_T1)), codes_GC[tiles_T])
        scales_G1[tiles_T] = torch.where(better_T1, -rotated_scale_T1, scale_T1)
    return payload_M


def _encode_tiles(x_GW: Tensor, scales_G1: Tensor, codes_GC: Tensor, outlier_G1: Tensor) -> None:
    work_GW = magnitudes(x_GW)
    peaks_G1 = work_GW.amax(1, keepdim=True)
    torch.gt(peaks_G1, work_GW.mean(1, keepdim=True).mul_(OUTLIER_RATIO), out=outlier_G1)
    inverse_G1 = write_scales(peaks_G1, INT4_LEVELS, scales_G1)
    codes_GC.copy_(_codes(torch.mul(x_GW, inverse_G1, out=work_GW)))


def _codes(scaled_GW: Tensor) -> Tensor:
    """Return bytes uint8_GC: byte c holds element 2c in its low four bits, 2c + 1 in its high ones. Overwrites its input."""
    pairs_GC = scaled_GW.add_(ZERO_CODE + 0.5).to(torch.int8).view(torch.int16)  # truncation rounds to nearest here
    return pairs_GC.bitwise_or_(pairs_GC >> 4).to(torch.uint8)


def decode_int4(payload_M: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Return x_N of `dtype`; a tile with a scale that is not finite decodes to values that are not finite."""
    groups = -(-count // INT4_TILE)
    x_GW = torch.empty(groups, INT4_TILE, dtype=dtype, device=payload_M.device)
    scales_G1, codes_GC = scales_and_codes(payload_M, groups)
    in_pieces(_decode_tiles, x_GW, scales_G1, codes_GC)
    tiles_T = torch.signbit(scales_G1).view(-1).nonzero().view(-1)
    if tiles_T.numel():
        x_GW[tiles_T] = (x_GW[tiles_T].float() @ _hadamard(x_GW.device)).neg_().to(dtype)
    return x_GW.view(-1)[:count]


def _decode_tiles(x_GW: Tensor, scales_G1: Tensor, codes_GC: Tensor) -> None:
    wide_GC = codes_GC.to(torch.int16)
    levels_GW = wide_GC.bitwise_or_(wide_GC << 4).bitwise_and_(0x0F0F).view(torch.int8).sub_(ZERO_CODE)
    torch.mul(levels_GW, scales_G1.float(), out=x_GW)


def _hadamard(device: torch.device) -> Tensor:
    """Return the orthonormal, symmetric 32-point Hadamard matrix (Sylvester's), which is its own inverse."""
    matrix_WW = torch.ones(1, 1, device=device)
    while matrix_WW.shape[0] < INT4_TILE:
        matrix_WW = torch.cat((torch.cat((matrix_WW, matrix_WW), 1), torch.cat((matrix_WW, -matrix_WW), 1)))
    return matrix_WW.mul_(INT4_TILE**-0.5)


def encode_int2(x_N: Tensor) -> Tensor:
    """Return the payload uint8_M on x's device: scales bfloat16_G, then 16 bytes of codes for each group.

    Code c stands for (2c - 3) times the scale, and none for zero: senders add the omitted rest to the next values. Scales from
    the mean magnitude lose less of one tensor, but clip the same elements each time: after 120 tensors with heavy tails their
    left-over was eleven times the tensor, and 0.9 times with this one.
    """
    x_GW = rows_of(x_N, INT2_GROUP)
    groups = x_GW.shape[0]
    payload_M = torch.empty(groups * (SCALE_BYTES + INT2_GROUP // 4), dtype=torch.uint8, device=x_N.device)
    in_pieces(_encode_levels, x_GW, *scales_and_codes(payload_M, groups))
    return payload_M


def _encode_levels(x_GW: Tensor, scales_G1: Tensor, codes_GC: Tensor) -> None:
    work_GW = magnitudes(x_GW)
    inverse_G1 = write_scales(work_GW.amax(1, keepdim=True), INT2_LEVELS, scales_G1)
    levels_GW = torch.mul(x_GW, inverse_G1, out=work_GW).mul_(0.5).floor_().add_(2).nan_to_num_(0.0).clamp_(0, 3)
    quads_GC4 = levels_GW.to(torch.uint8).view(len(codes_GC), -1, 4)
    codes_GC.copy_(quads_GC4[..., 0] | quads_GC4[..., 1] << 2 | quads_GC4[..., 2] << 4 | quads_GC4[..., 3] << 6)


def decode_int2(payload_M: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Return x_N of `dtype`; a group with a scale that is not finite decodes to values that are not finite."""
    groups = -(-count // INT2_GROUP)
    x_GW = torch.empty(groups, INT2_GROUP, dtype=dtype, device=payload_M.device)
    in_pieces(_decode_levels, x_GW, *scales_and_codes(payload_M, groups))
    return x_GW.view(-1)[:count]


def _decode_levels(x_GW: Tensor, scales_G1: Tensor, codes_GC: Tensor) -> None:
    shifts_4 = torch.arange(0, 8, 2, dtype=torch.uint8, device=codes_GC.device)
    levels_GW = (codes_GC.unsqueeze(-1) >> shifts_4).bitwise_and_(3).view(len(x_GW), -1).to(torch.int8)
    torch.mul(levels_GW.mul_(2).sub_(3), scales_G1.float(), out=x_GW)


def encode_int8(x_N: Tensor) -> Tensor:
    """Return the payload uint8_M on x's device: scales bfloat16_G, then codes int8_N."""
    x_GW = rows_of(x_N, INT8_GROUP)
    groups = x_GW.shape[0]
    payload_M = torch.empty(groups * (SCALE_BYTES + INT8_GROUP), dtype=torch.uint8, device=x_N.device)
    in_pieces(_encode_groups, x_GW, *scales_and_codes(payload_M, groups))
    return payload_M[: groups * SCALE_BYTES + x_N.numel()]


def _encode_groups(x_GW: Tensor, scales_G1: Tensor, codes_GC: Tensor) -> None:
    work_GW = magnitudes(x_GW)
    inverse_G1 = write_scales(work_GW.amax(1, keepdim=True), LEVELS, scales_G1)
    codes_GC.view(torch.int8).copy_(torch.mul(x_GW, inverse_G1, out=work_GW).round_())


def decode_int8(payload_M: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Return x_N of `dtype`; a group with a scale that is not finite decodes to values that are not finite."""
    groups = -(-count // INT8_GROUP)
    x_GW = torch.empty(groups, INT8_GROUP, dtype=dtype, device=payload_M.device)
    payload_M = rows_of(payload_M, groups * (SCALE_BYTES + INT8_GROUP)).view(-1)  # the last group may be cut short
    in_pieces(_decode_groups, x_GW, *scales_and_codes(payload_M, groups))
    return x_GW.view(-1)[:count]


def _decode_groups(x_GW: Tensor, scales_G1: Tensor, codes_GC: Tensor) -> None:
    torch.mul(codes_GC.view(torch.int8), scales_G1.float(), out=x_GW)


_STEP = np.float32(1 / LEVELS)
_SMALLEST = np.float32(SMALLEST_SCALE)
_SPLIT = np.float32((1 << 16) + 1)  # Veltkamp's: it leaves the 8 bits of significand of a bfloat16
_LARGEST = np.float32(2.0**110)  # of an element: the split must not overflow
# Made once, since making a dtype costs as much as an operation.
_HALVES, _FLOATS, _BITS, _CODES = np.dtype("<u2"), np.dtype("<f4"), np.dtype("<i4"), np.dtype(np.int8)
_OVERFLOWING = (127 + 120) << 7  # bits of 2^120 as a bfloat16: from there on products with a code may overflow
_STARTS = np.arange(0, MOST_ELEMENTS, INT8_GROUP)  # of the groups


def is_few(count: int) -> bool:
    """Return whether a tensor of `count` elements is small enough for numpy, in full groups."""
    return 0 < count <= MOST_ELEMENTS and count % INT8_GROUP == 0


def is_small(x: Tensor) -> bool:
    """Return whether `encode_small_int8` can encode the tensor."""
    return is_few(x.numel()) and x.dtype == torch.float32 and x.is_cpu


def encode_small_int8(x: Tensor) -> bytes | None:
    """Return the payload of a small tensor; None if it holds values that are huge or not finite."""
    x_GW: NDArray[Any] = (x.detach() if x.requires_grad else x).numpy().reshape(-1, INT8_GROUP)
    sizes_GW: NDArray[Any] = np.abs(x_GW)
    # As integers: magnitudes keep their order, NaN at the top, and integers are compared three times as fast.
    peaks_G = np.maximum.reduceat(sizes_GW.view(_BITS).ravel(), _STARTS[: len(x_GW)]).view(_FLOATS)
    if not np.maximum.reduce(peaks_G) < _LARGEST:
        return None
    scales_G = np.maximum(peaks_G * _STEP, _SMALLEST)
    split_G = scales_G * _SPLIT
    scales_G = split_G - (split_G - scales_G)  # to bfloat16: to the nearest, ties to even
    codes_GW = np.multiply(x_GW, np.reciprocal(scales_G)[:, None], sizes_GW)
    np.rint(codes_GW, codes_GW)
    return scales_G.view(_HALVES)[1::2].tobytes() + codes_GW.astype(_CODES).tobytes()


def decode_small_int8(payload: bytes | bytearray | memoryview, shape: tuple[int, ...], count: int) -> Tensor | None:
    """Return the float32 tensor of this shape and `count` elements; None if a scale is negative or 2^120 and more."""
    groups = count // INT8_GROUP
    halves_G = np.frombuffer(payload, _HALVES, groups)
    if np.maximum.reduce(halves_G) >= _OVERFLOWING:
        return None
    wide_G: NDArray[Any] = np.zeros(2 * groups, _HALVES)
    wide_G[1::2] = halves_G
    scales_G = wide_G.view(_FLOATS)
    codes_GW = np.frombuffer(payload, _CODES, count, 2 * groups).reshape(groups, INT8_GROUP)
    return torch.from_numpy((codes_GW * scales_G[:, None]).reshape(shape))
