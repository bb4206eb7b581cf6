"""Drawing tokens: a pure function of logits, parameters, row and position, so that a replay draws what was drawn before.

The randomness is counter-based: a hash of (seed, row, position) gives the one uniform number of a draw; there is no state to
lose. Everything after the logits happens on the CPU in float32, so that every device draws the same from the same logits.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class SamplingParameters(Protocol):
    """`temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off. As `codec.messages.Sampling`."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_p(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def seed(self) -> int: ...


def sample(logits_BV: Tensor, parameters: SamplingParameters, position: int, *, rows: Sequence[int] = ()) -> Tensor:
    """ids_B (int64) for the given position of each row. `rows` are the rows' numbers in their session (default 0..B-1)."""
    if parameters.temperature <= 0:
        return logits_BV.argmax(dim=-1).cpu()
    logits_BV = logits_BV.to("cpu", torch.float32)
    numbers = rows or range(len(logits_BV))
    ids = [
        _draw(logits_V, parameters, uniform(parameters.seed, row, position))
        for row, logits_V in zip(numbers, logits_BV, strict=True)
    ]
    return torch.tensor(ids, dtype=torch.int64)


def uniform(seed: int, row: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits: the SHA-256 of the three, little-endian 64-bit integers."""
    digest = hashlib.sha256(struct.pack("<QQQ", seed & 0xFFFFFFFFFFFFFFFF, row, position)).digest()
    return (int.from_bytes(digest[:8], "little") >> 11) / (1 << 53)


def _draw(logits_V: Tensor, parameters: SamplingParameters, number: float) -> int:
    """The token whose stretch of the cumulated probabilities, most likely first, holds `number`."""
    kept = min(parameters.top_k or len(logits_V), len(logits_V))
    ordered_K, ids_K = torch.sort(logits_V, descending=True, stable=True)
    probabilities_K = torch.softmax(ordered_K[:kept] / parameters.temperature, dim=0)
    cumulated_K = probabilities_K.to(torch.float64).cumsum(0)
    if parameters.top_p < 1:  # the smallest set of tokens that reaches top_p (nucleus sampling, arXiv 1904.09751)
        nucleus = int((cumulated_K < parameters.top_p).sum()) + 1
        cumulated_K = cumulated_K[:nucleus]
    index = int(torch.searchsorted(cumulated_K, number * float(cumulated_K[-1]), right=True))
    return int(ids_K[min(index, len(cumulated_K) - 1)])
