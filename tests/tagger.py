"""A module whose loss leaves labels out, and data of which some rows have none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

SAMPLES, T, V = 32, 8, 61
Batch = dict[str, Tensor]


class Tagger(nn.Module):
    """Gives a word to each position whose label is not left out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, 32)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(32, 2, 64, 0.1, batch_first=True) for _ in range(3))
        self.head = nn.Linear(32, V)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def tagger() -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    return Tagger(), {"input_ids": torch.randint(3, V, (4, T)), "labels": torch.randint(3, V, (4, T))}


def save_data(path: Path, *, few: bool = False) -> None:
    """Rows of which some have few labels, and some have none, unless a `few` are the least."""
    generator = np.random.default_rng(0)
    labels = generator.integers(3, V, (SAMPLES, T))
    for row in range(SAMPLES):
        labels[row, max(row % (T + 1), few) :] = -100
    np.savez(path, input_ids=generator.integers(3, V, (SAMPLES, T)), labels=labels)
