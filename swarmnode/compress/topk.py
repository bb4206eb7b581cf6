"""top-k: only the elements of largest magnitude, as 16-bit values, and where they were (`protocol/tensors.md`).

Positions are a bitmask or short indices, whichever is smaller, which follows from the two counts. The threshold is
that of a sample, since selecting exactly costs four times as much; the descriptor tells how many elements passed it.
Source: Aji and Heafield, Sparse Communication for Distributed Gradient Descent, arXiv 1704.05021, section 3.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from swarmnode.codec.tensors import (
    TOPK_BLOCK,
    TOPK_INDEX_BYTES,
    TOPK_VALUE_BYTES,
    topk_index_bytes,
    topk_mask_bytes,
)
from swarmnode.compress.blocks import in_pieces
from swarmnode.errors import ProtocolError

SAMPLES = 1 << 16  # a smaller tensor is selected from exactly
TOLERANCE = 0.25  # of the elements asked for; a sample that misses by more is not believed
_GATHER_BITS = 0x0102040810204080  # times eight bytes of 0 or 1: moves byte i to bit 56 + i
_SPREAD_BYTES = 0x0101010101010101  # times a byte: eight copies of it
_BIT_OF_BYTE = -0x7FBFDFEFF7FBFDFF  # byte i keeps bit i


def encode_topk(x_N: Tensor, keep: int) -> tuple[Tensor, int]:
    """Payload uint8_M on x's device, and how many elements it keeps: about `keep`, at least one; NaN is largest."""
    mask_N = select(x_N, min(max(keep, 1), x_N.numel()))
    positions_K = positions_of(mask_N)
    kept = positions_K.numel()
    values_K = x_N[positions_K].to(_half(x_N.dtype)).view(torch.uint8)
    return torch.cat((values_K, *_write_positions(mask_N, positions_K))), kept


def keep_largest(x_N: Tensor, kept: int) -> Tensor:
    """x_N as it is decoded where exactly its `kept` largest elements were sent: those of any threshold that so many passed."""
    places_K = x_N.abs().topk(min(max(kept, 1), x_N.numel()), sorted=False).indices
    values_K = x_N[places_K].to(_half(x_N.dtype)).to(x_N.dtype)
    return torch.zeros_like(x_N).index_copy_(0, places_K, values_K)


def decode_topk(payload_M: Tensor, count: int, kept: int, dtype: torch.dtype) -> Tensor:
    """x_N of `dtype`, zero where nothing was kept. Raises ProtocolError on bad positions."""
    split = TOPK_VALUE_BYTES * kept
    positions_K = _read_positions(payload_M[split:], count, kept)
    x_N = torch.zeros(count, dtype=dtype, device=payload_M.device)
    return x_N.index_copy_(0, positions_K, payload_M[:split].view(_half(dtype)).to(dtype))


def _half(dtype: torch.dtype) -> torch.dtype:
    return torch.float16 if dtype == torch.float16 else torch.bfloat16


def select(x_N: Tensor, keep: int) -> Tensor:
    """bool_N: about `keep` elements of largest magnitude. "Not below the threshold" lets NaN through, "above" not."""
    mask_N = torch.zeros(x_N.numel(), dtype=torch.bool, device=x_N.device)
    if x_N.numel() > SAMPLES:
        threshold = _sampled_threshold(x_N, keep)
        in_pieces(
            lambda x, mask: torch.lt(x.abs(), threshold, out=mask).logical_not_(), x_N.view(-1, 1), mask_N.view(-1, 1)
        )
        if abs(int(mask_N.count_nonzero()) - keep) <= TOLERANCE * keep:
            return mask_N
        mask_N.zero_()
    mask_N[x_N.abs().topk(keep, sorted=False).indices] = True
    return mask_N


def _sampled_threshold(x_N: Tensor, keep: int) -> Tensor:
    """The magnitude that a fraction keep / N of a sample reaches, in x's dtype; NaN counts as the largest."""
    sample_S = x_N[:: x_N.numel() // SAMPLES | 1].abs()  # an odd stride meets every column of a power of two
    rank = round(sample_S.numel() * (1 - keep / x_N.numel()))
    return sample_S.kthvalue(min(rank + 1, sample_S.numel())).values


def positions_of(mask_N: Tensor) -> Tensor:
    """int64_K: where the mask is true, rising. On the CPU numpy's search, which is four times as fast as torch's."""
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


def _read_positions(payload_M: Tensor, count: int, kept: int) -> Tensor:
    if topk_mask_bytes(count) <= topk_index_bytes(count, kept):
        return _read_mask(payload_M, count, kept)
    return _read_indices(payload_M, count, kept)


def _read_mask(payload_M: Tensor, count: int, kept: int) -> Tensor:
    spread_Q = payload_M.to(torch.int64).mul_(_SPREAD_BYTES).bitwise_and_(_BIT_OF_BYTE)
    positions_K = positions_of(spread_Q.view(torch.uint8) != 0)
    if positions_K.numel() != kept or (kept and int(positions_K[-1]) >= count):
        raise ProtocolError(f"a bitmask over {count} elements holds {positions_K.numel()} bits instead of {kept}")
    return positions_K


def _read_indices(payload_M: Tensor, count: int, kept: int) -> Tensor:
    split = TOPK_INDEX_BYTES * kept
    counts_B = payload_M[split:].view(torch.int32).to(torch.int64)
    indices_K = payload_M[:split].view(torch.int16).to(torch.int64).bitwise_and_(0xFFFF)
    return positions_in_blocks(indices_K, counts_B, TOPK_BLOCK, count)


def positions_in_blocks(indices_K: Tensor, counts_B: Tensor, block: int, count: int) -> Tensor:
    """Positions of indices within blocks of so many elements, each of which has its count of them. Raises ProtocolError if the
    counts do not add up, or positions do not rise within the tensor's `count` elements."""
    if int(counts_B.min()) < 0 or int(counts_B.sum()) != len(indices_K):
        raise ProtocolError(f"the blocks' counts of short indices do not add up to {len(indices_K)}")
    starts_B = torch.arange(len(counts_B), device=indices_K.device) * block
    positions_K = indices_K + starts_B.repeat_interleave(counts_B)
    if len(positions_K) and (int(positions_K[-1]) >= count or bool((positions_K.diff() <= 0).any())):
        raise ProtocolError("short indices do not rise, or pass the end of the tensor")
    return positions_K
