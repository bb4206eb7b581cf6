"""Start of an adapter's tensors: a pure function of the recipe's seed, the tensor's name and the base model."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
from torch import Tensor

from swarmnode.compute.executor import ByPiece, drain
from swarmnode.compute.training.adapters.adapter_weights import PIECE_ELEMENTS
from swarmnode.compute.training.randomness import hashed

PROMPT = "prompt_embeddings"
"""Name of a soft prompt, as peft saves it"""


def start_of_a(seed: int, layer: str, rank: int, inputs: int) -> Tensor:
    """Return the start of a layer's matrix A, float32_RI: uniform within 1 / sqrt(I), as peft draws it. B starts at zero."""
    a_RI = torch.empty(rank, inputs)
    drain(draw_a(a_RI, seed, layer))
    return a_RI


def draw_a(a_RI: Tensor, seed: int, layer: str) -> ByPiece[None]:
    """Draw the start of a layer's matrix A, on the CPU, and copy it into `a_RI`."""
    bound, generator = 1 / math.sqrt(a_RI.shape[1]), _generator(seed, layer)
    for part_N in a_RI.view(-1).split(PIECE_ELEMENTS):
        part_N.copy_(torch.empty(len(part_N)).uniform_(-bound, bound, generator=generator))
        yield


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
