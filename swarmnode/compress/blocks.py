"""What the block-wise codecs share: rows of one scale each, their scales, and pieces that stay in the CPU's cache.

Shape letters: N elements, M payload bytes, G groups (rows with one scale), W elements of a group,
C bytes of a group's codes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from swarmnode.codec.tensors import SCALE_BYTES

PIECE_ELEMENTS = 1 << 18  # 1 MiB of float32: pieces of 2**13, or 2**24 at once, are 3 to 4 times slower
SMALLEST_SCALE = 2.0**-126  # the smallest normal number: an all-zero group divides by it like any other


def rows_of(x_N: Tensor, width: int) -> Tensor:
    """x_GW: the elements as rows of `width`, the last one filled up with zeros where it is not full."""
    missing = -x_N.numel() % width
    return (pad(x_N, (0, missing)) if missing else x_N).view(-1, width)


def in_pieces(work: Callable[..., object], *tensors_GW: Tensor) -> None:
    """Call work(*pieces) for pieces of the same rows of all tensors; once for all on an accelerator (launches cost)."""
    first_GW = tensors_GW[0]
    rows = PIECE_ELEMENTS // first_GW.shape[1]
    if first_GW.shape[0] <= rows or first_GW.device.type != "cpu":
        work(*tensors_GW)
        return
    for pieces in zip(*(torch.split(tensor, rows) for tensor in tensors_GW), strict=True):
        work(*pieces)


def magnitudes(x_GW: Tensor) -> Tensor:
    """Magnitudes float32_GW, in memory of their own that may be overwritten."""
    return x_GW.abs() if x_GW.dtype == torch.float32 else x_GW.float().abs_()


def write_scales(peaks_G1: Tensor, levels: int, scales_G1: Tensor) -> Tensor:
    """Write one bfloat16 scale per group from the largest magnitudes float32_G1; return what to multiply elements by.

    Rounding moves a scale by at most 2**-8, so for at most 127 levels no code needs clamping: 127 (1 + 2**-8) < 127.5.
    NaN and infinity stay what they are. Overwrites `peaks_G1`.
    """
    scales_G1.copy_(peaks_G1.mul_(1 / levels).clamp_min_(SMALLEST_SCALE))
    return peaks_G1.copy_(scales_G1).reciprocal_()


def scales_and_codes(payload_M: Tensor, groups: int) -> list[Tensor]:
    """The payload's scales bfloat16_G1, which come first, and the bytes of its codes uint8_GC, as views."""
    scales_S, codes_C = payload_M.split_with_sizes((groups * SCALE_BYTES, payload_M.numel() - groups * SCALE_BYTES))
    return [scales_S.view(torch.bfloat16).view(groups, 1), codes_C.view(groups, -1)]
