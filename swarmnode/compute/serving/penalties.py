"""Penalties for tokens that were said before, and biases: what is done to logits before a token is drawn. On the host."""

from __future__ import annotations

import torch
from torch import Tensor

from swarmnode.codec.sampling import Sampling
from swarmnode.compute.serving.token_history import TokenHistory


def adjust(logits_V: Tensor, parameters: Sampling, history: TokenHistory | None, position: int) -> None:
    """Change logits_V (float32), from which the token at `position` is drawn: first by the repetition penalty (CTRL, arXiv
    1909.05858), then by frequency and presence penalty (OpenAI's API), then by the biases."""
    if history is not None:
        _penalise_repetition(logits_V, parameters.repetition_penalty, history, position)
        _penalise_frequency(logits_V, parameters, history, position)
    if parameters.logit_bias:
        ids, biases = zip(*parameters.logit_bias, strict=True)
        logits_V[torch.tensor(ids)] += torch.tensor(biases, dtype=torch.float32)


def _penalise_repetition(logits_V: Tensor, penalty: float, history: TokenHistory, position: int) -> None:
    if penalty == 1:
        return
    seen_N = torch.cat([history.prompt(), history.drawn(position)]).unique()
    values_N = logits_V[seen_N]
    logits_V[seen_N] = torch.where(values_N < 0, values_N * penalty, values_N / penalty)


def _penalise_frequency(logits_V: Tensor, parameters: Sampling, history: TokenHistory, position: int) -> None:
    if not parameters.frequency_penalty and not parameters.presence_penalty:
        return
    ids_N, counts_N = history.drawn(position).unique(return_counts=True)
    logits_V[ids_N] -= counts_N.float() * parameters.frequency_penalty + parameters.presence_penalty
