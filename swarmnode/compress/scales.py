"""What the block-wise codecs share: their scales, and the pieces that keep the work inside the CPU's cache."""

from __future__ import annotations

import torch
from torch import Tensor

PIECE_ELEMENTS = 1 << 17  # 512 KiB of float32: pieces of 2**13 are 3.5 times slower, 2**24 two times
SMALLEST_SCALE = 2.0**-126  # the smallest normal number: an all-zero group divides by it like any other


def piece_rows(width: int, device: torch.device) -> int:
    """How many rows of `width` elements to work on at once: what the cache holds; all on an accelerator."""
    return PIECE_ELEMENTS // width if device.type == "cpu" else 1 << 62


def group_scales(magnitudes_GW: Tensor, levels: int) -> Tensor:
    """One scale per group, bfloat16_G1: the group's largest magnitude over `levels`; NaN and infinity stay.

    Rounding moves a scale by at most 2**-8, so for at most 127 levels no code needs clamping: 127 (1 + 2**-8) < 127.5.
    """
    return magnitudes_GW.amax(1, keepdim=True).mul_(1 / levels).clamp_min_(SMALLEST_SCALE).bfloat16()
