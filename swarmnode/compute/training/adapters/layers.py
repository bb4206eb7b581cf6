"""Tensors of an adapter on one span: their names, shapes and starts, and the changes of the span's layers that they make."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from swarmnode.compute.executor import ByPiece, drain
from swarmnode.compute.model.adapters.adapter_file import PREFIX, units_of_layer
from swarmnode.compute.model.adapters.changes import row_blocks
from swarmnode.compute.model.span import ModelSpan
from swarmnode.compute.training.adapters.adapter_weights import MOMENTS, PIECE_ELEMENTS
from swarmnode.compute.training.adapters.recipe import AdapterRecipe
from swarmnode.compute.training.adapters.starts import PROMPT, draw_a, start_of_prompt
from swarmnode.compute.training.adapters.targets import Sizes, target_layers
from swarmnode.compute.training.adapters.trained_changes import TrainedChange, TrainedDora, TrainedLora
from swarmnode.ledger import Account

A, B, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
"""Ends of the names of a layer's tensors, as peft saves them"""
FLOAT_BYTES = 4
RIDGE = 1e-8
Shapes = dict[str, tuple[int, ...]]


class AdapterLayers:
    """Layers of a span that an adapter changes, and the names and shapes of its tensors there, before anything is allocated.

    Names are those of a folder that peft saves, without its prefix. `trained` take gradients; `frozen` keep their start.
    """

    def __init__(self, span: ModelSpan, recipe: AdapterRecipe) -> None:
        self.span, self.recipe = span, recipe
        found = target_layers(span.model, recipe)
        self.sizes = {layer: sizes for layer, sizes in found.items() if self._is_here(layer)}
        self.trained: Shapes = {}
        self.frozen: Shapes = {}
        for layer, sizes in self.sizes.items():
            trained, frozen = shapes_of(layer, sizes, recipe)
            self.trained |= trained
            self.frozen |= frozen
        if recipe.method == "prompt" and span.has_embedding:
            self.trained[PROMPT] = (recipe.prompt_tokens, span.hidden_size)

    def __repr__(self) -> str:
        return f"AdapterLayers({self.recipe.method}, {len(self.sizes)} layers of {self.span!r})"

    @property
    def elements(self) -> int:
        """Number of trained weights."""
        return sum(math.prod(shape) for shape in self.trained.values())

    @property
    def frozen_elements(self) -> int:
        """Number of the adapter's weights that are not trained."""
        return sum(math.prod(shape) for shape in self.frozen.values())

    def memory_bytes(self) -> dict[Account, int]:
        """Return the bytes that the adapter takes until it is closed, by account."""
        trained_bytes = FLOAT_BYTES * self.elements
        corrections_bytes = FLOAT_BYTES * len(self.frozen) * self.recipe.rank**2
        return {
            Account.ADAPTERS: trained_bytes + FLOAT_BYTES * self.frozen_elements + corrections_bytes,
            Account.GRADIENTS: trained_bytes,
            Account.OPTIMIZER: MOMENTS * trained_bytes,
        }

    def names_in(self, start: int, end: int) -> list[str]:
        """Return the names of the trained tensors in units [start, end)."""
        return [name for name in self.trained if start <= self._unit(name) < end]

    def _is_here(self, layer: str) -> bool:
        """Return whether a layer is one of the span's units: its model may hold more than a narrowed span."""
        return self.span.start <= units_of_layer(self.span.family, layer)[0] < self.span.end

    def _unit(self, name: str) -> int:
        if name == PROMPT:
            return 0
        return units_of_layer(self.span.family, layer_of(name))[0]

    def starts(self) -> dict[str, Tensor]:
        """Return the values of all tensors before the first step, trained and frozen, in float32 on the CPU."""
        found = {name: torch.zeros(shape) for name, shape in {**self.trained, **self.frozen}.items()}
        drain(self.start_by_piece(found))
        return found

    @torch.no_grad()
    def start_by_piece(self, tensors: Mapping[str, Tensor]) -> ByPiece[None]:
        """Set tensors, which are zero, to their values before the first step.

        A is drawn, B is zero, DoRA's magnitudes are the norms of the layer's rows, and a prompt is drawn from the embeddings.
        """
        for layer in self.sizes:
            yield from draw_a(tensors[f"{layer}.{A}"], self.recipe.seed, layer)
            if self.recipe.method == "dora":
                magnitude_O = tensors[f"{layer}.{MAGNITUDE}"]
                for outputs, _, block in row_blocks(self.span.model.get_submodule(layer), PIECE_ELEMENTS):
                    magnitude_O[outputs] += block.float().square().sum(dim=1).to(magnitude_O.device)
                    yield
                magnitude_O.sqrt_()
        if PROMPT in self.trained:
            count = self.recipe.prompt_tokens
            tensors[PROMPT].copy_(start_of_prompt(self.recipe.seed, self.span.model, count, self.span.vocab_size))
            yield

    def corrections(self, frozen: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield matrices (R, R) that the gradients of B are multiplied with, and the tensors' names, if A is frozen.

        The corrected gradient is the B whose product with A comes closest to the layer's own gradient:
        (1 / scale^2) (A A^T + 1e-8 I)^-1, as peft's `create_lorafa_optimizer` has it.
        """
        for name, a_RI in frozen.items():
            square_RR = a_RI @ a_RI.t() + RIDGE * torch.eye(len(a_RI), device=a_RI.device)
            yield f"{layer_of(name)}.{B}", torch.linalg.pinv(square_RR, hermitian=True) / self.recipe.scale**2

    def changes(self, tensors: Mapping[str, Tensor]) -> dict[str, TrainedChange]:
        """Return the changes of the span's layers by these tensors, by layer. DoRA's norms are not computed yet."""
        return {layer: self._change(layer, tensors) for layer in self.sizes}

    def _change(self, layer: str, tensors: Mapping[str, Tensor]) -> TrainedChange:
        lora = TrainedLora(tensors[f"{layer}.{A}"], tensors[f"{layer}.{B}"], self.recipe.scale)
        if self.recipe.method != "dora":
            return lora
        return TrainedDora(lora, tensors[f"{layer}.{MAGNITUDE}"], self.span.model.get_submodule(layer))


def shapes_of(layer: str, sizes: Sizes, recipe: AdapterRecipe) -> tuple[Shapes, Shapes]:
    """Return the names and shapes of a layer's tensors: those that take gradients, and those that keep their start."""
    inputs, outputs = sizes
    a_shape: Shapes = {f"{layer}.{A}": (recipe.rank, inputs)}
    trained: Shapes = {f"{layer}.{B}": (outputs, recipe.rank)}
    if recipe.method == "lora-fa":
        return trained, a_shape
    magnitude: Shapes = {f"{layer}.{MAGNITUDE}": (outputs,)} if recipe.method == "dora" else {}
    return {**a_shape, **trained, **magnitude}, {}


def file_name(name: str) -> str:
    """Return the name of a tensor in a folder that peft saves."""
    return name if name == PROMPT else f"{PREFIX}{name}"


def layer_of(name: str) -> str:
    """Return the layer that a tensor belongs to, by the tensor's name."""
    return next((name.removesuffix(f".{end}") for end in (A, B, MAGNITUDE) if name.endswith(f".{end}")), "")
