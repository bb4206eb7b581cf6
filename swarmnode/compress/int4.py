"""int4: tiles of 32 elements with one bfloat16 scale; tiles with an outlier are rotated (`protocol/tensors.md`).

An outlier takes the whole scale of its tile. The orthonormal 32-point Hadamard transform spreads it over all elements,
which then share a smaller scale; the sign bit of the scale, which is never negative, says that the tile was rotated.
Source of the rotation: Ashkboos et al., QuaRot, arXiv 2404.00456, section 4; per tile and only where it helps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from swarmnode.codec.tensors import INT4_TILE, SCALE_BYTES
from swarmnode.compress.blocks import in_pieces, magnitudes, rows_of, scales_and_codes, write_scales

LEVELS = 7
ZERO_CODE = 8  # codes are 8 + (-7..7), so that two of them fill a byte without sign extension
OUTLIER_RATIO = 5.0  # largest magnitude to mean one: 2.7 is usual for normal values, 5 is passed by one tile in 400
CODE_BYTES = INT4_TILE // 2


def encode_int4(x_N: Tensor) -> Tensor:
    """Payload uint8_M on x's device: scales bfloat16_G, then 16 bytes of codes for each tile."""
    x_GW = rows_of(x_N, INT4_TILE)
    groups = x_GW.shape[0]
    payload_M = torch.empty(groups * (SCALE_BYTES + CODE_BYTES), dtype=torch.uint8, device=x_N.device)
    scales_G1, codes_GC = scales_and_codes(payload_M, groups)
    outlier_G1 = torch.empty(groups, 1, dtype=torch.bool, device=x_N.device)
    in_pieces(_encode_tiles, x_GW, scales_G1, codes_GC, outlier_G1)
    tiles_T = outlier_G1.view(-1).nonzero().view(-1)
    if tiles_T.numel():
        _rotate_tiles(x_GW, scales_G1, codes_GC, tiles_T)
    return payload_M


def _encode_tiles(x_GW: Tensor, scales_G1: Tensor, codes_GC: Tensor, outlier_G1: Tensor) -> None:
    work_GW = magnitudes(x_GW)
    peaks_G1 = work_GW.amax(1, keepdim=True)
    torch.gt(peaks_G1, work_GW.mean(1, keepdim=True).mul_(OUTLIER_RATIO), out=outlier_G1)
    inverse_G1 = write_scales(peaks_G1, LEVELS, scales_G1)
    codes_GC.copy_(_codes(torch.mul(x_GW, inverse_G1, out=work_GW)))


def _rotate_tiles(x_GW: Tensor, scales_G1: Tensor, codes_GC: Tensor, tiles_T: Tensor) -> None:
    """Encode these tiles again, rotated, where that makes the scale smaller."""
    rotated_TW = x_GW[tiles_T].float() @ _hadamard(x_GW.device)
    scale_T1 = scales_G1[tiles_T]
    rotated_scale_T1 = torch.empty_like(scale_T1)
    inverse_T1 = write_scales(rotated_TW.abs().amax(1, keepdim=True), LEVELS, rotated_scale_T1)
    better_T1 = rotated_scale_T1 < scale_T1
    codes_GC[tiles_T] = torch.where(better_T1, _codes(rotated_TW.mul_(inverse_T1)), codes_GC[tiles_T])
    scales_G1[tiles_T] = torch.where(better_T1, -rotated_scale_T1, scale_T1)


def _codes(scaled_GW: Tensor) -> Tensor:
    """Bytes uint8_GC: byte c holds element 2c in its low four bits, 2c + 1 in its high ones. Overwrites its input."""
    pairs_GC = scaled_GW.add_(ZERO_CODE + 0.5).to(torch.int8).view(torch.int16)  # cutting rounds to the nearest
    return pairs_GC.bitwise_or_(pairs_GC >> 4).to(torch.uint8)


def decode_int4(payload_M: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """x_N of `dtype`; a tile whose scale is not finite decodes to values that are not finite either."""
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
    """The orthonormal, symmetric 32-point Hadamard matrix (Sylvester's): it is its own inverse."""
    matrix_WW = torch.ones(1, 1, device=device)
    while matrix_WW.shape[0] < INT4_TILE:
        matrix_WW = torch.cat((torch.cat((matrix_WW, matrix_WW), 1), torch.cat((matrix_WW, -matrix_WW), 1)))
    return matrix_WW.mul_(INT4_TILE**-0.5)
