"""AdamW whose moments are kept in 8 bits: a quarter of the memory, for tensors of which there is much.

Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization, arXiv 2110.02861: blocks of 256 elements, each with its
largest magnitude, and codes of a dynamic map, which is fine near that magnitude and reaches down to a millionth of it. Levels and
blocks are those of bitsandbytes, but not its kernels, which round otherwise on a CPU than on a card. Replicas hold the same state
whatever they compute on: here are only operations that round alike everywhere, none that multiplies and adds at once.

Shape letters: N elements of a tensor or a piece of it, G blocks, W elements of a block, L levels.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from swarmnode.compress.blocks import rows_of

BLOCK = 256
MIN_ELEMENTS = 4096  # smaller tensors (biases, norms) save nothing worth its error
MOMENT_BYTES = 1 + 4 / BLOCK  # per element
DECADES = 7  # of the dynamic map
CPU_PIECE, CARD_PIECE = 1 << 18, 1 << 21  # elements at once: of a cache; of what a node leaves free of its memory
SMALLEST, LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


def is_quantized(parameter: Tensor) -> bool:
    """Whether the moments of this parameter are kept in 8 bits."""
    return parameter.numel() >= MIN_ELEMENTS


def zero_magnitudes(parameter: Tensor) -> Tensor:
    """float32_G of the parameter's blocks: whatever the codes, with them moments are zero."""
    return torch.zeros(-(-parameter.numel() // BLOCK), device=parameter.device)


def adamw8bit(
    parameter: Tensor,
    gradient: Tensor,
    *,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    exp_avg_absmax: Tensor,
    exp_avg_sq_absmax: Tensor,
    step: int,
    learning_rate: float,
    betas: tuple[float, float],
    weight_decay: float,
    epsilon: float,
) -> None:
    """The update that ends step `step` (from 0) of one contiguous parameter, in place: the unrounded moments decide it.

    `exp_avg`, `exp_avg_sq`: codes uint8 of its shape; the others: their blocks' magnitudes float32_G.
    """
    size = CPU_PIECE if parameter.device.type == "cpu" else CARD_PIECE
    correction, correction_sq = (1 - beta ** (step + 1) for beta in betas)
    elements = (tensor.view(-1).split(size) for tensor in (parameter, gradient, exp_avg, exp_avg_sq))
    magnitudes = (tensor.split(size // BLOCK) for tensor in (exp_avg_absmax, exp_avg_sq_absmax))
    for parameter_N, gradient_N, mean_N, square_N, mean_G, square_G in zip(*elements, *magnitudes, strict=True):
        moment_N = dequantize(mean_N, mean_G, signed=True).mul_(betas[0]).add_(gradient_N * (1 - betas[0]))
        quantize(moment_N, mean_N, mean_G, signed=True)
        moment_sq_N = dequantize(square_N, square_G, signed=False).mul_(betas[1])
        moment_sq_N.add_((gradient_N * gradient_N).mul_(1 - betas[1]))
        quantize(moment_sq_N, square_N, square_G, signed=False)
        divisor_N = moment_sq_N.sqrt_().div_(math.sqrt(correction_sq)).add_(epsilon)
        parameter_N.mul_(1 - learning_rate * weight_decay).sub_(
            moment_N.div_(divisor_N).mul_(learning_rate / correction)
        )


def quantize(moment_N: Tensor, codes_N: Tensor, absmax_G: Tensor, *, signed: bool) -> None:
    """Write codes and magnitudes of a moment; what is infinite becomes the largest number."""
    moment_GW = rows_of(moment_N, BLOCK)
    absmax_G.copy_(moment_GW.abs().amax(1).clamp_(SMALLEST, LARGEST))
    share_N = (moment_GW / absmax_G.unsqueeze(1)).view(-1)[: len(codes_N)]
    bits_N = share_N.half().view(torch.int16).int().add_(1 << 15)
    codes_N.copy_(_codes_by_bits(codes_N.device, signed).index_select(0, bits_N))


def dequantize(codes_N: Tensor, absmax_G: Tensor, *, signed: bool) -> Tensor:
    """moment_N float32, in memory of its own."""
    moment_N = _levels(codes_N.device, signed).index_select(0, codes_N.int())
    return rows_of(moment_N, BLOCK).mul_(absmax_G.unsqueeze(1)).view(-1)[: len(codes_N)]


def dynamic_map(*, signed: bool) -> list[float]:
    """Its 256 levels in order, from -1 or 0 to 1: each decade has twice as many as the next smaller one."""
    levels = [0.0, 1.0]
    for decade in range(DECADES):
        count = (1 if signed else 2) << decade
        unit = 10 ** (DECADES - 1 - decade)
        magnitudes = [(0.1 + 0.9 * (place + 0.5) / count) / unit for place in range(count)]
        levels += magnitudes + ([-magnitude for magnitude in magnitudes] if signed else [])
    return sorted(levels)


@cache
def _levels(device: torch.device, signed: bool) -> Tensor:
    return torch.tensor(dynamic_map(signed=signed), device=device)


@cache
def _codes_by_bits(device: torch.device, signed: bool) -> Tensor:
    """The nearest level's code for each float16, by its bits as an int16 plus 2**15.

    No square is rounded down to zero: what is left of its first moment would be divided by epsilon alone, a thousandfold update.
    """
    shares_N = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.float16).float().nan_to_num_(0.0)
    levels_L = _levels(torch.device("cpu"), signed)
    codes_N = torch.bucketize(shares_N, (levels_L[1:] + levels_L[:-1]) / 2).clamp_(min=0 if signed else 1)
    return codes_N.to(device, torch.uint8)
