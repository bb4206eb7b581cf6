"""Gradient sketch: a long gradient in few numbers, so that what two replicas add to theirs can be compared without sending it.

The vector is cut into tiles, and each is summed with signs that follow from a seed. So sketches add up as gradients do, and what
one microbatch added is the sketch after it less the one before: one read of the sums each, and no copy of them.

Shape letters: N elements of a block's gradient, T of a tile, S tiles.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from swarmnode.codec.audit_messages import SEED_BYTES

TILES = 256  # of a block at least, where it has as many elements
LARGEST_TILE = 1 << 14
REMEMBERED = 8


def step_seed(run: bytes, step: int) -> bytes:
    """Of all sketches of a step, so that they add up. `run`: its id."""
    return hashlib.sha256(run + step.to_bytes(8, "little")).digest()[:SEED_BYTES]


@lru_cache(maxsize=REMEMBERED)
def signs(seed: bytes) -> Tensor:
    """signs_T (float32) of the longest tile: the bits of SHAKE-128 of the seed, the highest of each byte first."""
    bits = np.unpackbits(np.frombuffer(hashlib.shake_128(seed).digest(LARGEST_TILE // 8), dtype=np.uint8))
    return torch.from_numpy(bits.astype(np.float32) * 2 - 1)


def tile_length(elements: int) -> int:
    """Of a block with so many."""
    return min(LARGEST_TILE, max(1, elements // TILES))


def tile_count(elements: int) -> int:
    """Of a block with so many; the last one may be of nothing."""
    return elements // tile_length(elements) + 1


@torch.no_grad()
def gradient_sketch(gradients: Sequence[Tensor], seed: bytes) -> Tensor:
    """sketch_S (float32, on the CPU) of the gradients_N of blocks, one after another."""
    return torch.cat([torch.empty(0), *(_of_block(gradient_N, seed) for gradient_N in gradients)])


def _of_block(gradient_N: Tensor, seed: bytes) -> Tensor:
    tile = tile_length(len(gradient_N))
    signs_T = signs(seed)[:tile].to(gradient_N.device)
    whole = len(gradient_N) - len(gradient_N) % tile
    sums_S = gradient_N[:whole].view(-1, tile) @ signs_T
    rest_N = gradient_N[whole:]
    return torch.cat([sums_S, (rest_N @ signs_T[: len(rest_N)]).view(1)]).cpu()
