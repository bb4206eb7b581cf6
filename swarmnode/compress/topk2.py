"""top-k with values of two bits: a sign, and one of two magnitudes of a chunk (`protocol/tensors.md`).

Positions are bytes within blocks of 256 elements: at 2 % kept an element takes some 12 bits, where `topk.py` takes 32.
Source: Sarfi et al., SparseLoCo, arXiv 2508.15706, section 3: top-k by chunks of 4,096 with values of two bits. Here the threshold
is one for the whole tensor, since parts may learn nothing; the magnitudes are the means of a chunk's smaller and larger values.

Shape letters: N elements, K kept ones, C chunks, B blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from swarmnode.codec.tensors import TOPK2_BLOCK, TOPK2_CHUNK, TOPK2_LEVEL_BYTES
from swarmnode.compress.blocks import rows_of
from swarmnode.compress.topk import positions_in_blocks, positions_of, select

LEVELS = 2
NEGATIVE, LARGE = 1, 2  # bits of a code
CODES_PER_BYTE = 4
MOST_OF_BLOCK = TOPK2_BLOCK - 1  # what a count of one byte can say


def encode_topk2(x_N: Tensor, keep: int) -> tuple[Tensor, int]:
    """Payload uint8_M on x's device, and how many elements it keeps: about `keep`, at least one; NaN is largest."""
    mask_BW = rows_of(select(x_N, min(max(keep, 1), x_N.numel())).view(torch.uint8), TOPK2_BLOCK).view(torch.bool)
    counts_B = mask_BW.sum(1)
    full_B = counts_B > MOST_OF_BLOCK
    if bool(full_B.any()):
        mask_BW[full_B, rows_of(x_N, TOPK2_BLOCK)[full_B].abs().nan_to_num_(torch.inf).argmin(1)] = False
        counts_B = counts_B.clamp_max_(MOST_OF_BLOCK)
    positions_K = positions_of(mask_BW.view(-1))
    values_K = x_N[positions_K].float()
    levels_CL, large_K = _levels(values_K.abs(), positions_K // TOPK2_CHUNK, -(-x_N.numel() // TOPK2_CHUNK))
    codes_K = (values_K < 0) * NEGATIVE + large_K * LARGE
    payload_M = torch.cat(
        (
            levels_CL.view(-1).view(torch.uint8),
            _pack(codes_K.to(torch.uint8)),
            (positions_K % TOPK2_BLOCK).to(torch.uint8),
            counts_B.to(torch.uint8),
        )
    )
    return payload_M, positions_K.numel()


def _levels(magnitudes_K: Tensor, chunks_K: Tensor, chunks: int) -> tuple[Tensor, Tensor]:
    """The two magnitudes bfloat16_CL of each chunk, and bool_K: whose is the larger one. What is not finite is large."""
    finite_K = magnitudes_K.isfinite()
    means_C = _means(magnitudes_K.where(finite_K, magnitudes_K.new_zeros(())), chunks_K, chunks)
    large_K = ~(magnitudes_K <= means_C[chunks_K])
    levels = [_means(magnitudes_K[of_K], chunks_K[of_K], chunks) for of_K in (~large_K, large_K)]
    return torch.stack(levels, 1).to(torch.bfloat16), large_K


def _means(values_K: Tensor, chunks_K: Tensor, chunks: int) -> Tensor:
    """mean_C; 0 where there is nothing. In float64: float32 would round the mean of equal magnitudes to another one."""
    sums_C = torch.zeros(chunks, dtype=torch.float64, device=values_K.device).index_add_(0, chunks_K, values_K.double())
    return (sums_C / torch.bincount(chunks_K, minlength=chunks).clamp_min_(1)).float()


def _pack(codes_K: Tensor) -> Tensor:
    """Four codes in a byte, the first one in its lowest bits."""
    codes_QF = rows_of(codes_K, CODES_PER_BYTE)
    return codes_QF[:, 0] | codes_QF[:, 1] << 2 | codes_QF[:, 2] << 4 | codes_QF[:, 3] << 6


def decode_topk2(payload_M: Tensor, count: int, kept: int, dtype: torch.dtype) -> Tensor:
    """x_N of `dtype`, zero where nothing was kept. Raises ProtocolError on bad positions."""
    chunks, blocks = -(-count // TOPK2_CHUNK), -(-count // TOPK2_BLOCK)
    sizes = (LEVELS * TOPK2_LEVEL_BYTES * chunks, -(-kept // CODES_PER_BYTE), kept, blocks)
    levels_M, packed_Q, indices_K, counts_B = payload_M.split_with_sizes(sizes)
    positions_K = positions_in_blocks(indices_K.to(torch.int64), counts_B.to(torch.int64), TOPK2_BLOCK, count)
    shifts_F = torch.arange(0, 8, 2, device=payload_M.device, dtype=torch.uint8)
    codes_K = (packed_Q[:, None] >> shifts_F).view(-1)[:kept].bitwise_and_(NEGATIVE | LARGE)
    levels_CL = levels_M.contiguous().view(torch.bfloat16).float().view(chunks, LEVELS)
    values_K = levels_CL[positions_K // TOPK2_CHUNK, (codes_K // LARGE).long()]
    values_K = torch.where(codes_K % LARGE == NEGATIVE, -values_K, values_K)
    return torch.zeros(count, dtype=dtype, device=payload_M.device).index_copy_(0, positions_K, values_K.to(dtype))
