"""Writers of GGUF's formats with one scale for each block of 32, from whole numbers and float16 scales: nothing is rounded.

The layouts are those of ggml's `block_q4_0`, `block_q5_0`, `block_q8_0` and `block_mxfp4`
(https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 32
_HALF = BLOCK // 2


@dataclass(frozen=True)
class WholeNumbers:
    """Format of GGUF for whole numbers from `smallest` to `largest`. `write` makes the bytes (N, B) behind the scales of blocks."""

    name: str
    smallest: int
    largest: int
    write: Callable[[Tensor], Tensor]

    def holds(self, integers_OI: Tensor) -> bool:
        """Return whether the format has all these numbers."""
        smallest, largest = (int(value) for value in torch.aminmax(integers_OI))
        return self.smallest <= smallest and largest <= self.largest

    def rows(self, integers_OI: Tensor, scales_OB: Tensor) -> Tensor:
        """Return rows (O, bytes) of numbers that the format holds, and of scales (float16) for each 32 inputs."""
        blocks_NE = integers_OI.reshape(-1, BLOCK)
        scales_N2 = scales_OB.reshape(-1, 1).contiguous().view(torch.uint8)
        return torch.cat([scales_N2, self.write(blocks_NE)], dim=1).view(len(integers_OI), -1)


def _nibbles(codes_NE: Tensor) -> Tensor:
    """Return bytes (N, 16): the lower halves hold numbers 0 to 15 of a block, the upper ones numbers 16 to 31."""
    return codes_NE[:, :_HALF] | codes_NE[:, _HALF:] << 4


def _four_bits(blocks_NE: Tensor) -> Tensor:
    return _nibbles((blocks_NE + 8).to(torch.uint8))


def _five_bits(blocks_NE: Tensor) -> Tensor:
    codes_NE = (blocks_NE + 16).to(torch.uint8)
    highest_NE = (codes_NE >> 4).view(-1, 4, 8)
    highest_N4 = highest_NE[:, :, 0].clone()
    for place in range(1, 8):
        highest_N4 |= highest_NE[:, :, place] << place
    return torch.cat([highest_N4, _nibbles(codes_NE & 0xF)], dim=1)


def _eight_bits(blocks_NE: Tensor) -> Tensor:
    return blocks_NE.to(torch.int8).view(torch.uint8)


WHOLE_NUMBERS = (
    WholeNumbers("Q4_0", -8, 7, _four_bits),
    WholeNumbers("Q5_0", -16, 15, _five_bits),
    WholeNumbers("Q8_0", -128, 127, _eight_bits),
)
"""Formats for whole numbers, the smallest first"""


def mxfp4_rows(blocks_OGB: Tensor, scales_OG: Tensor) -> Tensor:
    """Return MXFP4 as GGUF has it (O, bytes), from blocks (O, I/32, 16) whose bytes hold neighbours, and their exponents."""
    codes_OGE = torch.stack([blocks_OGB & 0xF, blocks_OGB >> 4], -1).flatten(-2)
    bytes_NB = _nibbles(codes_OGE.view(-1, BLOCK))
    return torch.cat([scales_OG.reshape(-1, 1), bytes_NB], dim=1).view(len(blocks_OGB), -1)
