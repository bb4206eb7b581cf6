"""A small network with two inputs and two outputs, as a user would hand it to `create --module` to have it served."""

from __future__ import annotations

import torch
from torch import Tensor, nn

SIDE, CLASSES, WORDS = 8, 4, 11


class Segmenter(nn.Module):
    """Returns a class for each image and a score for each pixel. A mask and a skip cross what lies between."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.hint = nn.Embedding(WORDS, 16)
        self.down = nn.Sequential(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(), nn.Dropout(0.5))
        self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.leave = nn.Linear(32, CLASSES)

    def forward(self, image: Tensor, hint: Tensor) -> dict[str, Tensor]:
        lit = image > 0
        wide = self.enter(image) + self.hint(hint)[:, :, None, None]
        joined = torch.cat((wide, self.up(self.down(wide))), dim=1)
        pixels = joined.mean(dim=1).masked_fill(lit[:, 0], 0.0)
        return {"classes": self.leave(joined.mean(dim=(2, 3))), "pixels": pixels}


def segmenter() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(5)
    return Segmenter(), {"image": torch.randn(4, 1, SIDE, SIDE), "hint": torch.arange(4)}
