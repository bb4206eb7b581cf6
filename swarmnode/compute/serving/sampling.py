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

HEAD = 1024  # of the vocabulary, put in order first


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
    """The token whose stretch of the cumulated probabilities, most likely first, holds `number`.

    The largest few logits nearly always hold it, so the whole vocabulary is put in order only where they do not.
    """
    kept = min(parameters.top_k or len(logits_V), len(logits_V))
    first = kept if parameters.top_k else min(kept, HEAD)
    token = _draw_among(first, kept, logits_V, parameters, number)
    if token is None:
        token = _draw_among(kept, kept, logits_V, parameters, number)
    assert token is not None  # all were looked at
    return token


def _draw_among(count: int, kept: int, logits_V: Tensor, parameters: SamplingParameters, number: float) -> int | None:
    """The token, looked for among the `count` most likely of the `kept` ones; None where more are needed."""
    ordered_C, ids_C = _largest(logits_V, count)
    scaled_C = ordered_C.double() / parameters.temperature
    total = scaled_C.logsumexp(0) if count == kept else (logits_V.double() / parameters.temperature).logsumexp(0)
    cumulated_C = (scaled_C - total).exp().cumsum(0)
    last = float(cumulated_C[-1]) if count == kept else 1.0
    if parameters.top_p < 1:  # the smallest set of tokens that reaches top_p (nucleus sampling, arXiv 1904.09751)
        nucleus = int((cumulated_C < parameters.top_p).sum()) + 1
        if nucleus > count and count < kept:
            return None
        cumulated_C = cumulated_C[:nucleus]
        last = float(cumulated_C[-1])
    index = int(torch.searchsorted(cumulated_C, number * last, right=True))
    if index >= len(cumulated_C) and count < kept:
        return None
    return int(ids_C[min(index, len(cumulated_C) - 1)])


def _largest(logits_V: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(values, ids) of the `count` largest, largest first, equal ones by id."""
    ids = torch.arange(len(logits_V))
    if count < len(logits_V):
        ids = (logits_V >= torch.topk(logits_V, count).values[-1]).nonzero()[:, 0]
    ordered, order = torch.sort(logits_V[ids], descending=True, stable=True)
    return ordered[:count], ids[order][:count]
