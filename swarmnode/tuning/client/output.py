"""Output of a tuning: the weights of an adapter as a folder that peft reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from swarmnode.compute.model.assemble import outline
from swarmnode.compute.model.family import Family
from swarmnode.compute.training.adapters.adapter_weights import VECTORS
from swarmnode.compute.training.adapters.layers import A, file_name, start_of_a, target_layers
from swarmnode.compute.training.adapters.recipe import AdapterRecipe
from swarmnode.compute.training.adapters.saved_folder import save_adapter
from swarmnode.tuning.client.tuned_route import AdapterState

WEIGHT = f"{VECTORS[0]}/"
"""Beginning of the names of weights in a state"""


def adapter_tensors(family: Family, recipe: AdapterRecipe, state: AdapterState) -> dict[str, Tensor]:
    """Return the weights of a state by the names that peft saves, with LoRA-FA's frozen matrices, which follow from the seed."""
    found: dict[str, Tensor] = {}
    for raw in state.layers.values():
        tensors = safetensors.torch.load(raw)
        found |= {name.removeprefix(WEIGHT): one for name, one in tensors.items() if name.startswith(WEIGHT)}
    return filed(family, recipe, found)


def filed(family: Family, recipe: AdapterRecipe, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return an adapter's trained tensors under the names that peft saves, with the frozen ones of its recipe."""
    found = dict(tensors)
    if recipe.method == "lora-fa":
        model = outline(family, 0, family.units, dtype=torch.float32)
        for layer, (inputs, _) in target_layers(model, recipe).items():
            found[f"{layer}.{A}"] = start_of_a(recipe.seed, layer, recipe.rank, inputs)
    return {file_name(name): tensor for name, tensor in sorted(found.items())}


def write_adapter(family: Family, recipe: AdapterRecipe, state: AdapterState, out: Path, *, base: str) -> None:
    """Write an adapter of the model named `base` into the folder `out`. Raises LocalError if it cannot be written."""
    save_adapter(out, recipe, adapter_tensors(family, recipe, state), base=base)
