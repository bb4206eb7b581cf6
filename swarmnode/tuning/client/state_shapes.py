"""Shapes of an adapter's state, which its owner derives from the model's config: a peer that gives another state is caught.

Output of a tuning: the weights of an adapter as a folder that peft reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from swarmnode.codec.tuning_messages import AdapterPiece
from swarmnode.compute.model.adapters.adapter_file import units_of_layer
from swarmnode.compute.model.assemble import outline
from swarmnode.compute.model.family import Family
from swarmnode.compute.training.adapters.adapter_recipe import AdapterRecipe
from swarmnode.compute.training.adapters.layers import (
    FLOAT_BYTES,
    PROMPT,
    STEP,
    VECTORS,
    A,
    Shapes,
    file_name,
    shapes_of,
    start_of_a,
    target_layers,
)
from swarmnode.compute.training.adapters.saved_folder import save_adapter
from swarmnode.compute.training.saved_activations import is_finite
from swarmnode.errors import CheckpointError, ErrorCode, ProtocolError, UsageError
from swarmnode.net.interfaces import Buffer
from swarmnode.tuning.adapter_parts import SLACK_BYTES, decode_state

WEIGHTS, *_, SQUARES = VECTORS


@dataclass(frozen=True)
class StateShapes:
    """Names and shapes of an adapter's trained tensors, by unit of the model. Made by `of`."""

    units: Mapping[int, Shapes]

    @classmethod
    def of(cls, family: Family, recipe: AdapterRecipe) -> StateShapes:
        """Return the shapes for a model of `family`, whose weights are not needed."""
        model = outline(family, 0, family.units, dtype=torch.float32)
        units: dict[int, Shapes] = {unit: {} for unit in range(family.units)}
        for layer, sizes in target_layers(model, recipe).items():
            units[units_of_layer(family, layer)[0]] |= shapes_of(layer, sizes, recipe)[0]
        if recipe.method == "prompt":
            units[0][PROMPT] = (recipe.prompt_tokens, int(model.config.hidden_size))
        return cls(units)

    def most_bytes(self, unit: int) -> int:
        """Return an upper bound of the bytes of a unit's file."""
        return len(VECTORS) * FLOAT_BYTES * sum(map(prod, self.units[unit].values())) + SLACK_BYTES

    def check_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Raise UsageError if `weights` of a whole adapter have other names or shapes than these."""
        wanted = {name: shape for shapes in self.units.values() for name, shape in shapes.items()}
        found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        for name in sorted(wanted.keys() | found.keys()):
            if wanted.get(name) != found.get(name):
                raise UsageError(
                    f"the adapter has {name[:100]} of shape {found.get(name)}, the model and the adapter's settings ask for "
                    f"{wanted.get(name)}: use an adapter of this model"
                )

    def check(self, unit: int, raw: bytes, step: int, *, gradients: bool, peer: str) -> None:
        """Check the file that `peer` gave for a unit: its state at the beginning of `step`, or its sums of gradients.

        Raises ProtocolError if names, shapes or the step are others, or values are NaN, infinite, or no squares.
        """
        kinds = (WEIGHTS,) if gradients else VECTORS
        wanted = {f"{kind}/{name}": shape for kind in kinds for name, shape in self.units[unit].items()}
        if not gradients:
            wanted[STEP] = ()
        try:
            found = decode_state(raw)
        except CheckpointError as error:
            raise ProtocolError(str(error), peer=peer) from None
        if {name: tuple(tensor.shape) for name, tensor in found.items()} != wanted or not _is_state(found, step):
            raise ProtocolError(f"the state of unit {unit} is not that of the adapter at step {step}", peer=peer)
        if not is_finite([tensor for name, tensor in found.items() if name != STEP]):
            text = f"the state of unit {unit} holds NaN or infinity"
            raise ProtocolError(text, code=ErrorCode.NOT_FINITE, peer=peer)


@dataclass(frozen=True)
class AdapterState:
    """Weights and optimiser state of a whole adapter at the beginning of `step`: for each layer the bytes of a safetensors file."""

    step: int
    layers: Mapping[int, bytes]


class ComingState:
    """State that comes in pieces: the files of `units`, in order. `files` are the complete ones."""

    def __init__(self, shapes: StateShapes, units: range) -> None:
        self.files: dict[int, bytes] = {}
        self._shapes = shapes
        self._units = units
        self._file = bytearray()  # the beginning of the next one

    @property
    def is_complete(self) -> bool:
        """Whether all files are here."""
        return len(self.files) == len(self._units)

    def accept_piece(self, body: AdapterPiece, payload: Buffer) -> None:
        """Take the next piece. Raises ProtocolError if it is another one, or its file would be larger than the adapter's."""
        unit, came = self._units.start + len(self.files), len(self._file) + len(payload)
        is_due = not self.is_complete and body.unit == unit and body.offset == len(self._file)
        if not is_due or not len(payload) or came > body.size or came > self._shapes.most_bytes(unit):
            raise ProtocolError("a piece of a state that does not fit")
        self._file += payload
        if came == body.size:
            self.files[unit], self._file = bytes(self._file), bytearray()


def _is_state(tensors: Mapping[str, Tensor], step: int) -> bool:
    """Return whether dtypes, the number of updates and the signs of squares are those of a state at `step`."""
    floats = {name: tensor for name, tensor in tensors.items() if name != STEP}
    is_at_step = STEP not in tensors or (tensors[STEP].dtype == torch.int64 and int(tensors[STEP]) == step)
    return (
        is_at_step
        and all(tensor.dtype == torch.float32 for tensor in floats.values())
        and not any(bool((tensor < 0).any()) for name, tensor in floats.items() if name.startswith(f"{SQUARES}/"))
    )


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
