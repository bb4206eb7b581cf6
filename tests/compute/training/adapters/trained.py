"""Routes of adapter trainers in one process, and batches to train them on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from swarmnode.compute.executor import drain
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.span import ModelSpan
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.training.adapters.adapter_recipe import AdapterRecipe
from swarmnode.compute.training.adapters.adapter_trainer import AdapterTrainer
from swarmnode.compute.training.adapters.layers import file_name
from swarmnode.compute.training.optimizer import clip_factor
from swarmnode.data.rows import NO_LABEL

MICROBATCHES, ROWS, LENGTH, VOCABULARY = 2, 2, 12, 97
DISTINCT = 4  # steps after which the data begin again, so that there is something to learn
UNLABELLED = 4  # first tokens of one row, as of a question

Batch = list[tuple[Tensor, Tensor]]
"""Microbatches of a step: ids_BS and labels_BS"""
SMALL = AdapterRecipe(rank=4, alpha=8, prompt_tokens=3, seed=1)


def batch_of(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step % DISTINCT)
    found = []
    for _ in range(MICROBATCHES):
        ids_BS = torch.randint(2, VOCABULARY, (ROWS, LENGTH), generator=generator)
        labels_BS = ids_BS.clone()
        labels_BS[0, :UNLABELLED] = NO_LABEL
        found.append((ids_BS, labels_BS))
    return found


def labels_of(batch: Batch, recipe: AdapterRecipe) -> int:
    """Number of labels that count: behind a soft prompt the first token has one, too."""
    first = 0 if recipe.method == "prompt" else 1
    return sum(int((labels_BS[:, first:] != NO_LABEL).sum()) for _, labels_BS in batch)


class WholeTrainer(AdapterTrainer):
    """Does each work at once, without pieces; it is at its start when it is made."""

    def __init__(self, span: ModelSpan, recipe: AdapterRecipe, *, name: str) -> None:
        super().__init__(span, recipe, name=name)
        drain(self.start_by_piece())

    def forward(self, *arguments: Any, **named: Any) -> Tensor:
        return drain(self.forward_by_piece(*arguments, **named))

    def loss(self, number: int, labels_BS: Tensor, share: float) -> tuple[float, int]:
        return drain(self.loss_by_piece(number, labels_BS, share))

    def backward(self, number: int, gradient_BTH: Tensor | None = None) -> Tensor | None:
        return drain(self.backward_by_piece(number, gradient_BTH))

    def gradient_square(self) -> float:
        return drain(self.gradient_square_by_piece())

    def step(self, number: int, learning_rate: float, scale: float) -> None:
        drain(self.step_by_piece(number, learning_rate, scale))

    def load(self, state: Mapping[str, Tensor]) -> None:
        drain(self.load_by_piece(state))

    def weights(self) -> dict[str, Tensor]:
        """The adapter's tensors on this span by the names of a folder that peft saves."""
        tensors = {**self._frozen, **self._weights.tensors}
        return {file_name(name): tensor.detach() for name, tensor in sorted(tensors.items())}


@dataclass
class Route:
    """Trainers of one adapter, one for each span, in order."""

    trainers: Sequence[WholeTrainer]
    recipe: AdapterRecipe

    @classmethod
    def through(cls, checkpoint: Checkpoint, cuts: Sequence[int], recipe: AdapterRecipe, **options: Any) -> Route:
        spans = [load_span(checkpoint, start, end, check=False, **options) for start, end in pairwise(cuts)]
        return cls([WholeTrainer(span, recipe, name="tuned") for span in spans], recipe)

    def gradients(self, batch: Batch) -> float:
        """The mean loss of a batch, whose gradients are summed. All its microbatches are in flight at once."""
        total, count = 0.0, labels_of(batch, self.recipe)
        for number, (x, labels_BS) in enumerate(batch):
            for trainer in self.trainers:
                x = trainer.forward(number, x)
            total += self.trainers[-1].loss(number, labels_BS, 1 / count)[0]
        for number in range(len(batch)):
            gradient: Tensor | None = None
            for trainer in reversed(self.trainers):
                gradient = trainer.backward(number, gradient)
        return total / count

    def update(self, step: int, learning_rate: float) -> None:
        norm = sum(trainer.gradient_square() for trainer in self.trainers) ** 0.5
        for trainer in self.trainers:
            trainer.step(step, learning_rate, clip_factor(self.recipe.clip, norm))

    def train(self, steps: range, rate: float = 1e-2, data: Callable[[int], Batch] = batch_of) -> list[float]:
        """The losses of some steps."""
        losses = []
        for step in steps:
            losses.append(self.gradients(data(step)))
            self.update(step, rate)
        return losses

    def weights(self) -> dict[str, Tensor]:
        return {name: tensor for trainer in self.trainers for name, tensor in trainer.weights().items()}

    @torch.inference_mode()
    def logits(self, ids_BS: Tensor) -> Tensor:
        """The logits that serving gives with the present adapter."""
        x = ids_BS
        for trainer in self.trainers:
            x = trainer.span.forward(x, cache=None, adapters=(trainer.name,) * len(x))
        return x
