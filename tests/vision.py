"""A small image classifier with batch norms and a connection that skips, as a user would hand it to `create --module`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

SIDE, CLASSES = 8, 4


class Classifier(nn.Module):
    """Returns the mean loss of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.down = nn.Sequential(nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
        self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.leave = nn.Linear(32, CLASSES)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        wide = self.enter(image)
        joined = torch.cat((wide, self.up(self.down(wide))), dim=1)
        return functional.cross_entropy(self.leave(joined.mean(dim=(2, 3))), label)


def classifier() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(5)
    return Classifier(), {"image": torch.randn(4, 1, SIDE, SIDE), "label": torch.arange(4)}


def write_images(path: Path, samples: int = 256) -> None:
    """Bright quarters: the label is where the light is."""
    generator = np.random.default_rng(1)
    label = generator.integers(0, CLASSES, samples)
    image = generator.normal(0, 0.3, (samples, 1, SIDE, SIDE)).astype(np.float32)
    half = SIDE // 2
    for row, corner in enumerate(label):
        top, left = half * (corner // 2), half * (corner % 2)
        image[row, 0, top : top + half, left : left + half] *= 1.0 + corner
    np.savez(path, image=image, label=label)
