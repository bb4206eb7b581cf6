"""Codecs of the elements of largest magnitude and their positions: top-k with 16-bit values, top-k2 with 2-bit values
(`protocol/tensors.md`).

Positions are a bitmask or short indices, whichever is smaller, which follows from the two counts. The threshold is that of a
sample, since exact selection costs four times as much; the descriptor has the number of elements that passed it. Source: Aji and
Heafield, Sparse Communication for Distributed Gradient Descent, arXiv 1704.05021, section 3.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from swarmnode.codec.tensors import (
    TOPK2_BLOCK,
    TOPK2_CHUNK,
    TOPK2_LEVEL_BYTES,
    TOPK_BLOCK,
    TOPK_INDEX_BYTES,
    TOPK_VALUE_BYTES,
    topk_index_bytes,
    topk_mask_bytes,
)
from swarmnode.compress.blockwise import in_pieces, rows_of
from swarmnode.errors import ProtocolError

LEVELS = 2
NEGATIVE, LARGE = 1, 2  # bits of a code
CODES_PER_BYTE = 4
MOST_OF_BLOCK = TOPK2_BLOCK - 1  # largest count in one byte
SAMPLES = 1 << 16  # a smaller tensor is selected from exactly
TOLERANCE = 0.25  # share of the elements asked for; if a sample's threshold misses by more, selection is exact
_GATHER_BITS = 0x0102040810204080  # times eight bytes of 0 or 1: moves byte i to bit 56 + i
_SPREAD_BYTES = 0x0101010101010101  # times a byte: eight copies of it
_BIT_OF_BYTE = -0x7FBFDFEFF7FBFDFF  # byte i keeps bit i


def encode_topk(x_N: Tensor, target: int) -> tuple[Tensor, int]:
    """Return the payload uint8_M on x's device and the number of elements in it: about `target`, at least one. NaN counts as
    largest."""
    mask_N = select(x_N, min(max(target, 1), x_N.numel()))
    positions_K = positions_of(mask_N)
    kept = positions_K.numel()
    values_K = x_N[positions_K].to(_half(x_N.dtype)).view(torch.uint8)
    return torch.cat((values_K, *_write_positions(mask_N, positions_K))), kept


def largest_only(x_N: Tensor, selected: int) -> Tensor:
    """Return x_N as decoded after exactly its `selected` largest elements were sent."""
    places_K = x_N.abs().topk(min(max(selected, 1), x_N.numel()), sorted=False).indices
    values_K = x_N[places_K].to(_half(x_N.dtype)).to(x_N.dtype)
    return torch.zeros_like(x_N).index_copy_(0, places_K, values_K)


def decode_topk(payload_M: Tensor, count: int, selected: int, dtype: torch.dtype) -> Tensor:
    """Return x_N of `dtype`, zero for elements that were not kept. Raises ProtocolError on bad positions."""
    split = TOPK_VALUE_BYTES * selected
    positions_K = _read_positions(payload_M[split:], count, selected)
    x_N = torch.zeros(count, dtype=dtype, device=payload_M.device)
    return x_N.index_copy_(0, positions_K, payload_M[:split].view(_half(dtype)).to(dtype))


def _half(dtype: torch.dtype) -> torch.dtype:
    return torch.float16 if dtype == torch.float16 else torch.bfloat16


def select(x_N: Tensor, target: int) -> Tensor:
    """Return bool_N: about `target` elements of largest magnitude. The test "not below the threshold" lets NaN pass, "above" would
    not."""
    mask_N = torch.zeros(x_N.numel(), dtype=torch.bool, device=x_N.device)
    if x_N.numel() > SAMPLES:
        threshold = _sampled_threshold(x_N, target)
        in_pieces(
            lambda x, mask: torch.lt(x.abs(), threshold, out=mask).logical_not_(), x_N.view(-1, 1), mask_N.view(-1, 1)
        )
        if abs(int(mask_N.count_nonzero()) - target) <= TOLERANCE * target:
            return mask_N
        mask_N.zero_()
    mask_N[x_N.abs().topk(target, sorted=False).indices] = True
    return mask_N


def _sampled_threshold(x_N: Tensor, target: int) -> Tensor:
    """Return the magnitude that a fraction keep / N of a sample reaches, in x's dtype; NaN counts as the largest."""
    sample_S = x_N[:: x_N.numel() // SAMPLES | 1].abs()  # an odd stride visits every column if they are a power of two
    rank = round(sample_S.numel() * (1 - target / x_N.numel()))
    return sample_S.kthvalue(min(rank + 1, sample_S.numel())).values


def positions_of(mask_N: Tensor) -> Tensor:
    """Return int64_K: the positions at which the mask is true, rising. On the CPU by numpy, which is four times as fast as
    torch."""
    if mask_N.device.type == "cpu":
        return torch.from_numpy(mask_N.numpy().nonzero()[0])
    return mask_N.nonzero().view(-1)


def _write_positions(mask_N: Tensor, positions_K: Tensor) -> list[Tensor]:
    count, kept = mask_N.numel(), positions_K.numel()
    if topk_mask_bytes(count) <= topk_index_bytes(count, kept):
        bytes_Q = pad(mask_N.view(torch.uint8), (0, -count % 8)).view(torch.int64)
        return [((bytes_Q * _GATHER_BITS) >> 56).to(torch.uint8)]
    blocks = -(-count // TOPK_BLOCK)
    counts_B = torch.bincount(positions_K // TOPK_BLOCK, minlength=blocks).to(torch.int32)
    return [positions_K.to(torch.int16).view(torch.uint8), counts_B.view(torch.uint8)]


def _read_positions(payload_M: Tensor, count: int, selected: int) -> Tensor:
    if topk_mask_bytes(count) <= topk_index_bytes(count, selected):
        spread_Q = payload_M.to(torch.int64).mul_(_SPREAD_BYTES).bitwise_and_(_BIT_OF_BYTE)
        positions_K = positions_of(spread_Q.view(torch.uint8) != 0)
        if positions_K.numel() != selected or (selected and int(positions_K[-1]) >= count):
            raise ProtocolError(
                f"a bitmask over {count} elements holds {positions_K.numel()} bits instead of {selected}"
            )
        return positions_K
    split = TOPK_INDEX_BYTES * selected
    counts_B = payload_M[split:].view(torch.int32).to(torch.int64)
    indices_K = payload_M[:split].view(torch.int16).to(torch.int64).bitwise_and_(0xFFFF)
    return positions_in_blocks(indices_K, counts_B, TOPK_BLOCK, count)


def positions_in_blocks(indices_K: Tensor, counts_B: Tensor, block: int, count: int) -> Tensor:
    """Return the positions of indices within blocks of `block` elements; `counts_B` is the number of indices in each block.

    Raises ProtocolError if the counts do not add up, or positions do not rise within the tensor's `count` elements.
    """
    if int(counts_B.min()) < 0 or int(counts_B.sum()) != len(indices_K):
        raise ProtocolError(f"the blocks' counts of short indices do not add up to {len(indices_K)}")
    starts_B = torch.arange(len(counts_B), device=indices_K.device) * block
    positions_K = indices_K + starts_B.repeat_interleave(counts_B)
    if len(positions_K) and (int(positions_K[-1]) >= count or bool((positions_K.diff() <= 0).any())):
        raise ProtocolError("short indices do not rise, or pass the end of the tensor")
    return positions_K


def encode_topk2(x_N: Tensor, target: int) -> tuple[Tensor, int]:
    """Return the payload uint8_M on x's device and the number of elements in it: about `target`, at least one. NaN counts as
    largest."""
    mask_BW = rows_of(select(x_N, min(max(target, 1), x_N.numel())).view(torch.uint8), TOPK2_BLOCK).view(torch.bool)
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
    """Return the two magnitudes bfloat16_CL of each chunk, and bool_K: whether an element has the larger one. Elements that are not
    finite do."""
    finite_K = magnitudes_K.isfinite()
    means_C = _means(magnitudes_K.where(finite_K, magnitudes_K.new_zeros(())), chunks_K, chunks)
    large_K = ~(magnitudes_K <= means_C[chunks_K])
    levels = [_means(magnitudes_K[of_K], chunks_K[of_K], chunks) for of_K in (~large_K, large_K)]
    return torch.stack(levels, 1).to(torch.bfloat16), large_K


def _means(values_K: Tensor, chunks_K: Tensor, chunks: int) -> Tensor:
    """Return mean_C, 0 for chunks without values. In float64: float32 would round the mean of equal magnitudes to another value."""
    sums_C = torch.zeros(chunks, dtype=torch.float64, device=values_K.device).index_add_(0, chunks_K, values_K.double())
    return (sums_C / torch.bincount(chunks_K, minlength=chunks).clamp_min_(1)).float()


def _pack(codes_K: Tensor) -> Tensor:
    """Return bytes of four codes each, the first code in the lowest bits."""
    codes_QF = rows_of(codes_K, CODES_PER_BYTE)
    return codes_QF[:, 0] | codes_QF[:, 1] << 2 | codes_QF[:, 2] << 4 | codes_QF[:, 3] << 6


def decode_topk2(payload_M: Tensor, count: int, selected: int, dtype: torch.dtype) -> Tensor:
    """Return x_N of `dtype`, zero for elements that were not kept. Raises ProtocolError on bad positions."""
    chunks, blocks = -(-count // TOPK2_CHUNK), -(-count // TOPK2_BLOCK)
    sizes = (LEVELS * TOPK2_LEVEL_BYTES * chunks, -(-selected // CODES_PER_BYTE), selected, blocks)
    levels_M, packed_Q, indices_K, counts_B = payload_M.split_with_sizes(sizes)
    positions_K = positions_in_blocks(indices_K.to(torch.int64), counts_B.to(torch.int64), TOPK2_BLOCK, count)
    shifts_F = torch.arange(0, 8, 2, device=payload_M.device, dtype=torch.uint8)
    codes_K = (packed_Q[:, None] >> shifts_F).view(-1)[:selected].bitwise_and_(NEGATIVE | LARGE)
    levels_CL = levels_M.contiguous().view(torch.bfloat16).float().view(chunks, LEVELS)
    values_K = levels_CL[positions_K // TOPK2_CHUNK, (codes_K // LARGE).long()]
    values_K = torch.where(codes_K % LARGE == NEGATIVE, -values_K, values_K)
    return torch.zeros(count, dtype=dtype, device=payload_M.device).index_copy_(0, positions_K, values_K.to(dtype))
