"""Start of an adapter's tensors: a pure function of the recipe's seed, the tensor's name and the base model."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
from torch import Tensor

from swarmnode.compute.training.randomness import hashed

PROMPT = "prompt_embeddings"
"""Name of a soft prompt, as peft saves it"""


def start_of_a(seed: int, layer: str, rank: int, inputs: int) -> Tensor:
    """Return the start of a layer's matrix A, float32_RI: uniform within 1 / sqrt(I), as peft draws it. B starts at zero."""
    bound = 1 / math.sqrt(inputs)
    return torch.empty(rank, inputs).uniform_(-bound, bound, generator=_generator(seed, layer))


@torch.no_grad()
def start_of_prompt(seed: int, model: Any, tokens: int, vocabulary: int) -> Tensor:
    """Return the start of a soft prompt, float32_PH: the model's embeddings of random tokens (arXiv 2104.08691)."""
    ids_P = torch.randint(vocabulary, (tokens,), generator=_generator(seed, PROMPT))
    embedding = model.get_input_embeddings()
    embedded_PH: Tensor = embedding(ids_P.to(embedding.weight.device))
    return embedded_PH.float()


def _generator(seed: int, name: str) -> torch.Generator:
    word = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    return torch.Generator().manual_seed(hashed(seed, word))
