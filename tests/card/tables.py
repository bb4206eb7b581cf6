"""A module that looks things up by what its samples say."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

WORDS, PLACES, CLASSES = 9, 6, 5
SAMPLES = 4


class Tables(nn.Module):
    """An embedding, an index into a buffer, a gather of one score for each sample, and class labels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, 8)
        self.norm = nn.BatchNorm1d(8)
        self.linear = nn.Linear(8, CLASSES)
        self.places: Tensor
        self.register_buffer("places", torch.randn(PLACES, 8))

    def forward(self, word: Tensor, place: Tensor, label: Tensor) -> Tensor:
        """The loss."""
        hidden = self.norm(self.words(word) + self.places[place])
        scores = self.linear(functional.dropout(torch.relu(hidden), 0.25, True))
        chosen = scores.gather(1, label.clamp(0, CLASSES - 1)[:, None])
        return functional.cross_entropy(scores, label) + chosen.square().mean()


def batch_of_tables() -> dict[str, Tensor]:
    """By the names of the arguments."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"word": WORDS, "place": PLACES, "label": CLASSES}
    return {name: torch.randint(0, size, (SAMPLES,), generator=generator) for name, size in sizes.items()}
