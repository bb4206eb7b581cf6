"""Modules to export: a convolutional net with everything that is awkward, a U-Net, GPT-2, a short ResNet."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel, ResNetConfig, ResNetForImageClassification

from swarmnode.compute.graph.boundary import Layout
from swarmnode.compute.graph.graph import Graph
from swarmnode.compute.training.datasets.batches import Microbatch

Batch = dict[str, Tensor]
CLASSES = 10
VOCABULARY = 99
BLOCKS = (2, 2, 12, 2)  # of a ResNet's stages: as many as let a unit be a whole block


class Awkward(nn.Module):
    """Writes in place, keeps a moving average, stops gradients, has a frozen weight and an infinity, splits and joins."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, padding=1)
        self.normalization = nn.BatchNorm2d(8)
        self.dropout = nn.Dropout(dropout)
        self.middle = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, CLASSES)
        self.register_buffer("average", torch.zeros(8))
        self.register_buffer("scale", torch.full((8,), 0.5))

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        x = functional.relu(self.normalization(self.convolution(image)), inplace=True)
        x = self.dropout(x.mean((2, 3)))
        with torch.no_grad():
            target = torch.tanh(self.middle(x))
            self.average.mul_(0.9).add_(0.1 * x.mean(0))
        left, right = self.middle(x).chunk(2, dim=1)
        x = torch.cat((right, left), dim=1) + self.frozen(x) * self.scale + x.detach() * self.average
        x = self.dropout(x)
        x[:, 0] = 1
        scores = self.head(x).masked_fill(torch.arange(CLASSES) < 0, float("-inf"))
        return functional.cross_entropy(scores, label) + (x - target).square().sum() / x.shape[0]


class UNet(nn.Module):
    """Two levels down and up, with skips over everything between."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down = nn.ModuleList(_block(before, after) for before, after in ((3, width), (width, 2 * width)))
        self.bottom = _block(2 * width, 2 * width)
        self.up = nn.ModuleList(_block(before, after) for before, after in ((4 * width, width), (2 * width, width)))
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, noisy: Tensor, clean: Tensor) -> dict[str, Tensor]:
        x, skips = noisy, []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.bottom(x)
        for block in self.up:
            x = functional.interpolate(x, scale_factor=2.0, mode="nearest")
            x = block(torch.cat((x, skips.pop()), dim=1))
        return {"loss": functional.mse_loss(noisy + self.head(x), clean)}


def _block(before: int, after: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(2, after), nn.SiLU())


def build(kind: str) -> nn.Module:
    """A random module in training mode."""
    torch.manual_seed(0)
    if kind == "resnet":
        widths: Any = {"embedding_size": 8, "hidden_sizes": [16, 16, 32, 32]}
        return ResNetForImageClassification(ResNetConfig(depths=[*BLOCKS], num_labels=CLASSES, **widths)).train()
    if kind == "gpt2":
        off: Any = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "bos_token_id": None, "eos_token_id": None}
        config = GPT2Config(
            n_embd=32, n_layer=3, n_head=4, n_positions=32, vocab_size=VOCABULARY, use_cache=False, **off
        )
        return GPT2LMHeadModel(config).train()
    return UNet() if kind == "unet" else Awkward()


def batch_of(kind: str, samples: int, seed: int = 0) -> Batch:
    """Random data for a module."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "gpt2":
        ids = torch.randint(0, VOCABULARY, (samples, 12), generator=generator)
        return {"input_ids": ids, "labels": ids}
    image = torch.randn(samples, 3, 32, 32, generator=generator)
    if kind == "unet":
        return {"noisy": image, "clean": torch.randn(samples, 3, 32, 32, generator=generator)}
    label = torch.randint(0, CLASSES, (samples,), generator=generator)
    return {"pixel_values": image, "labels": label} if kind == "resnet" else {"image": image, "label": label}


def loss_of(module: nn.Module, batch: Batch) -> Tensor:
    """What the module says itself."""
    output = module(**batch)
    return output if isinstance(output, Tensor) else output["loss"]


def split(graph: Graph, batch: Batch) -> Microbatch:
    """What enters a graph, and what its last unit takes."""
    named = {item.name: batch[item.argument] for item in graph.inputs}
    layout = Layout(graph)
    return Microbatch(
        *(tuple(named[value.ref.name] for value in values) for values in (layout.boundaries[0], layout.labels))
    )
