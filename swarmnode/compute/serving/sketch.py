"""Sketches: hidden states in a few dozen numbers a position, so that two replicas can be compared without sending tensors.

Random projections onto signs, as in Activation-DiFR (arXiv 2511.20621): the distance of two sketches is an unbiased measure of
the distance of what was sketched. The signs follow from a seed that is chosen after the states were sent, so that nobody can
change states and keep their sketch.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from swarmnode.codec.audit_messages import SKETCH_BYTES, SKETCH_VALUES
from swarmnode.errors import ProtocolError

REMEMBERED_SEEDS = 8


@lru_cache(maxsize=REMEMBERED_SEEDS)
def _signs(seed: bytes, width: int) -> Tensor:
    """signs_HK (float64) of -1 and 1: the bits of SHAKE-128 of the seed, the highest of each byte first, row by row."""
    stream = hashlib.shake_128(seed).digest(width * SKETCH_VALUES // 8)
    bits = np.unpackbits(np.frombuffer(stream, dtype=np.uint8))
    return torch.from_numpy(bits.astype(np.float64) * 2 - 1).view(width, SKETCH_VALUES)


def sketch(hidden_TH: Tensor, seed: bytes) -> Tensor:
    """sketch_TK (float32) of hidden states of any float dtype. Summed in float64: in whatever order, it is the same."""
    return (hidden_TH.to("cpu", torch.float64) @ _signs(seed, hidden_TH.shape[-1])).to(torch.float32)


def sketch_bytes(sketch_TK: Tensor) -> bytes:
    """As they travel."""
    return sketch_TK.contiguous().numpy().astype("<f4").tobytes()


def read_sketches(data: bytes | bytearray | memoryview, count: int) -> Tensor:
    """sketch_TK of `count` positions. Raises ProtocolError where there are not so many, or they are not finite."""
    if len(data) != count * SKETCH_BYTES:
        raise ProtocolError(f"sketches of {count} positions in {len(data)} bytes")
    sketch_TK = torch.from_numpy(np.frombuffer(data, dtype="<f4").astype(np.float32)).view(count, SKETCH_VALUES)
    if not bool(sketch_TK.isfinite().all()):
        raise ProtocolError("sketches that are not finite")
    return sketch_TK


def deviations(one_TK: Tensor, other_TK: Tensor, *, least: float = 0.0) -> list[float]:
    """For each position the distance of two sketches, relative to their lengths: 0 where they are equal, infinite where one alone
    is zero. `least`: what a position is taken for at least, in lengths of a usual one: of gradients some are nothing but rounding.
    """
    one_TK, other_TK = one_TK.double(), other_TK.double()
    distance_T = (one_TK - other_TK).norm(dim=-1)
    length_T = (one_TK.norm(dim=-1) * other_TK.norm(dim=-1)).sqrt()
    if least:
        length_T = length_T.clamp_min(least * float(length_T.square().mean().sqrt()))
    return torch.where(distance_T == 0, 0.0, distance_T / length_T).tolist()
