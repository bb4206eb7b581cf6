"""Drawing tokens: a pure function of logits, parameters, row and position, so that a replay draws what was drawn before.

The randomness is counter-based: a hash of (seed, row, position) gives the one uniform number of a draw; there is no state to
lose. Everything after the logits happens on the CPU in float32, so that every device draws the same from the same logits.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from swarmnode.codec.sampling import Sampling

HEAD = 1024  # of the vocabulary, put in order first


def sample(logits_BV: Tensor, parameters: Sampling, position: int, *, rows: Sequence[int] = ()) -> Tensor:
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


class Candidates(NamedTuple):
    """What most draws of some rows need of their logits: the largest values_BC (float32), in order, their ids_BC, and total_B
    (float64), the logarithm of the sum of exponentials of all that are kept, over the temperature."""

    values_BC: Tensor
    ids_BC: Tensor
    total_B: Tensor


def candidates(logits_BV: Tensor, parameters: Sampling) -> Candidates:
    """On the logits' device, which need not be waited for. One more than are looked among, so that a tie at the edge shows."""
    kept, count = _counts(logits_BV.shape[1], parameters)
    values_BC, ids_BC = torch.topk(logits_BV.float(), min(count + 1, logits_BV.shape[1]))
    all_BV = values_BC[:, :count] if count == kept else logits_BV
    return Candidates(values_BC, ids_BC, (all_BV.double() / parameters.temperature).logsumexp(1))


def sample_candidates(known: Candidates, vocabulary: int, parameters: Sampling, position: int) -> Tensor | None:
    """ids_B as `sample` draws them, on the host; None where that takes all logits."""
    kept, count = _counts(vocabulary, parameters)
    ids = []
    for row, (values_C, ids_C, total) in enumerate(zip(*known, strict=True)):
        if len(values_C) > count and values_C[count] == values_C[count - 1]:
            return None  # which of the equal ones are among the first is not known here
        by_id = ids_C[:count].argsort()
        ordered_C, order = torch.sort(values_C[by_id], descending=True, stable=True)
        number = uniform(parameters.seed, row, position)
        token = _pick(ordered_C, ids_C[by_id][order], total, count == kept, parameters, number)
        if token is None:
            return None
        ids.append(token)
    return torch.tensor(ids, dtype=torch.int64)


def _counts(vocabulary: int, parameters: Sampling) -> tuple[int, int]:
    """How many of the most likely tokens may be drawn, and among how many one is looked for first."""
    kept = min(parameters.top_k or vocabulary, vocabulary)
    return kept, kept if parameters.top_k else min(kept, HEAD)


def _draw(logits_V: Tensor, parameters: Sampling, number: float) -> int:
    """The token whose stretch of the cumulated probabilities, most likely first, holds `number`.

    The largest few logits nearly always hold it, so the whole vocabulary is put in order only where they do not.
    """
    kept, first = _counts(len(logits_V), parameters)
    token = _draw_among(first, kept, logits_V, parameters, number)
    if token is None:
        token = _draw_among(kept, kept, logits_V, parameters, number)
    assert token is not None  # all were looked at
    return token


def _draw_among(count: int, kept: int, logits_V: Tensor, parameters: Sampling, number: float) -> int | None:
    """The token, looked for among the `count` most likely of the `kept` ones; None where more are needed."""
    ordered_C, ids_C = _largest(logits_V, count)
    scaled_C = ordered_C.double() / parameters.temperature
    total = scaled_C.logsumexp(0) if count == kept else (logits_V.double() / parameters.temperature).logsumexp(0)
    return _pick(ordered_C, ids_C, total, count == kept, parameters, number)


def _pick(
    ordered_C: Tensor, ids_C: Tensor, total: Tensor, are_all: bool, parameters: Sampling, number: float
) -> int | None:
    """The token among these, which are in order, whose stretch holds `number`; None where it lies behind them."""
    likelihood_C = (ordered_C.double() / parameters.temperature - total).exp()
    cumulated_C = likelihood_C.cumsum(0)
    last = float(cumulated_C[-1]) if are_all else 1.0
    if parameters.top_p < 1 or parameters.min_p > 0:
        kept = _truncation(likelihood_C, cumulated_C, parameters)
        if kept > len(cumulated_C) and not are_all:
            return None
        cumulated_C = cumulated_C[:kept]
        last = float(cumulated_C[-1])
    index = int(torch.searchsorted(cumulated_C, number * last, right=True))
    if index >= len(cumulated_C) and not are_all:
        return None
    return int(ids_C[min(index, len(cumulated_C) - 1)])


def _truncation(likelihood_C: Tensor, cumulated_C: Tensor, parameters: Sampling) -> int:
    """How many of the most likely tokens are kept: the smallest set that reaches top_p (nucleus sampling, arXiv 1904.09751), and
    of these who are at least min_p times as likely as the first (arXiv 2407.01082). More than these where others may be, too."""
    kept = len(likelihood_C) + 1
    if parameters.top_p < 1:
        kept = int((cumulated_C < parameters.top_p).sum()) + 1
    if parameters.min_p > 0:
        likely = int((likelihood_C >= parameters.min_p * likelihood_C[0]).sum())
        kept = min(kept, likely if likely < len(likelihood_C) else likely + 1)
    return kept


def _largest(logits_V: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(values, ids) of the `count` largest, largest first, equal ones by id."""
    ids = torch.arange(len(logits_V))
    if count < len(logits_V):
        ids = (logits_V >= torch.topk(logits_V, count).values[-1]).nonzero()[:, 0]
    ordered, order = torch.sort(logits_V[ids], descending=True, stable=True)
    return ordered[:count], ids[order][:count]
