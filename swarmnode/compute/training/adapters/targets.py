"""Layers that an adapter changes: the linear layers of a model that a recipe names."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from swarmnode.compute.model.adapters.changes import features_of
from swarmnode.compute.model.assemble import outline
from swarmnode.compute.model.family import Family
from swarmnode.compute.training.adapters.recipe import ALL_LINEAR, PLACELESS, AdapterRecipe
from swarmnode.errors import UsageError

Sizes = tuple[int, int]
"""Numbers of inputs and outputs of a linear layer"""

TOLD = 12  # names of layers in an error


def target_layers(model: Any, recipe: AdapterRecipe) -> dict[str, Sizes]:
    """Return the linear layers of `model`, a whole one or a span's, that the adapter changes, by name.

    Methods of `PLACELESS` change none. "all-linear" leaves out the head, as peft does.
    """
    layers = _linear_layers(model)
    if recipe.method in PLACELESS:
        return {}
    if recipe.targets == ALL_LINEAR:
        head = model.get_output_embeddings()
        return {name: sizes for name, sizes in layers.items() if model.get_submodule(name) is not head}
    return {name: sizes for name, sizes in layers.items() if _is_named(name, recipe.targets)}


def linear_layers(family: Family) -> dict[str, bool]:
    """Return the names of a model's linear layers, and whether each is the head. Weights are not needed."""
    model = outline(family, 0, family.units, dtype=torch.float32)
    head = model.get_output_embeddings()
    return {name: model.get_submodule(name) is head for name in _linear_layers(model)}


def check_targets(family: Family, recipe: AdapterRecipe, layers: Mapping[str, bool] | None = None) -> None:
    """Raise UsageError if the model has no linear layer of some name in the recipe. `layers` are its `linear_layers`, if known."""
    if recipe.method in PLACELESS:
        return
    layers = linear_layers(family) if layers is None else layers
    if recipe.targets == ALL_LINEAR and all(layers.values()):
        raise UsageError("the model has no linear layers that an adapter could change; use --method prompt")
    for end in () if recipe.targets == ALL_LINEAR else recipe.targets:
        if not any(_is_named(name, (end,)) for name in layers):
            known = sorted({name.rpartition(".")[2] for name in layers})
            raise UsageError(
                f"the model has no linear layer {end[:64]!r} (experts in one tensor are no linear layers); "
                f"it has {', '.join(known[:TOLD])}{', …' if len(known) > TOLD else ''}"
            )


def _linear_layers(model: Any) -> dict[str, Sizes]:
    found = ((name, features_of(module)) for name, module in model.named_modules())
    return {name: sizes for name, sizes in found if sizes is not None}


def _is_named(layer: str, ends: Collection[str]) -> bool:
    return any(layer == end or layer.endswith(f".{end}") for end in ends)
