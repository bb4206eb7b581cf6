"""An adapter's two files: its config, and the matrices A and B of each layer that it changes, in safetensors.

The second may be a sparse copy in which only the header and the wanted matrices are present, as a checkpoint's files may.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from swarmnode.compute.adapters.lora import Lora, features_of
from swarmnode.compute.adapters.lora_config import LoraConfig, read_lora_config
from swarmnode.compute.model.checkpoint import TensorEntry, read_header
from swarmnode.errors import CheckpointError

if TYPE_CHECKING:
    from swarmnode.compute.model.family import Family

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"  # as peft writes them
KEY = re.compile(r"base_model\.model\.(?P<module>[^\s]+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")
DTYPES = frozenset({"F32", "F16", "BF16"})


@dataclass(frozen=True)
class LoraEntry:
    """The two matrices of one layer, by their names in the file: A of shape (rank, inputs), B of shape (outputs, rank)."""

    a: str
    b: str
    rank: int
    inputs: int
    outputs: int

    @property
    def elements(self) -> int:
        """Of both matrices."""
        return self.rank * (self.inputs + self.outputs)


class AdapterFile:
    """The layers that an adapter changes, by their modules' names in the model. Raises CheckpointError, naming the file, where
    anything does not fit."""

    def __init__(self, config: Path, weights: Path) -> None:
        self.config: LoraConfig = read_lora_config(config)
        self.config_file = config
        self.weights = weights
        self.tensors: Mapping[str, TensorEntry] = read_header(weights)
        self.layers: Mapping[str, LoraEntry] = self._pair()

    def __repr__(self) -> str:
        return f"<AdapterFile {self.weights} of rank {self.config.rank}, {len(self.layers)} layers>"

    def _pair(self) -> dict[str, LoraEntry]:
        sides: dict[str, dict[str, str]] = {}
        for name, tensor in self.tensors.items():
            key = KEY.fullmatch(name)
            if name.endswith(("base_layer.weight", "embed_tokens.weight")):
                raise self._wrong(
                    f"{name[:100]} is a layer of the model itself (save_pretrained with save_embedding_layers=False)"
                )
            if key is None:
                raise self._wrong(f"{name[:100]} is no matrix A or B of a linear layer")
            if tensor.dtype not in DTYPES or len(tensor.shape) != 2:
                raise self._wrong(f"{name[:100]} is no matrix of floating-point numbers")
            if sides.setdefault(key["module"], {}).setdefault(key["side"], name) != name:
                raise self._wrong(f"the layer {key['module'][:100]} is there twice")
        if not sides:
            raise self._wrong("it changes nothing")
        return {module: self._layer(module, pair) for module, pair in sides.items()}

    def _layer(self, module: str, pair: Mapping[str, str]) -> LoraEntry:
        if set(pair) != {"A", "B"}:
            raise self._wrong(f"the layer {module[:100]} lacks one of its two matrices")
        (rank, inputs), (outputs, inner) = self.tensors[pair["A"]].shape, self.tensors[pair["B"]].shape
        if not rank == inner == self.config.rank:
            raise self._wrong(
                f"the matrices of {module[:100]} have rank {rank} and {inner}, the config says {self.config.rank}"
            )
        return LoraEntry(pair["A"], pair["B"], rank, inputs, outputs)

    def _wrong(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.weights}: {what}: only plain LoRA of linear layers is served")

    # -- of a span

    def layers_of(self, family: Family, start: int, end: int) -> dict[str, LoraEntry]:
        """The layers that are in units [start, end) of the model."""
        return {
            module: layer
            for module, layer in self.layers.items()
            if any(start <= unit < end for unit in family.units_of_tensor(f"{module}.weight"))
        }

    def tensors_of(self, family: Family, start: int, end: int) -> list[TensorEntry]:
        """Where the matrices of these units lie in the file."""
        layers = self.layers_of(family, start, end).values()
        return [self.tensors[name] for layer in layers for name in (layer.a, layer.b)]

    def bytes_of(self, family: Family, start: int, end: int, dtype: torch.dtype) -> int:
        """What the matrices of these units take in memory."""
        return dtype.itemsize * sum(layer.elements for layer in self.layers_of(family, start, end).values())

    def check(self, family: Family, model: nn.Module, start: int, end: int) -> None:
        """Raises CheckpointError where a layer of these units is none of `model`'s, which may be on the meta device, or has another
        shape."""
        for module in self.layers:
            if not family.units_of_tensor(f"{module}.weight"):
                raise CheckpointError(f"{self.weights}: the model has no layer {module[:100]}")
        for module, layer in self.layers_of(family, start, end).items():
            try:
                found = features_of(model.get_submodule(module))
            except AttributeError:
                raise CheckpointError(f"{self.weights}: the model has no layer {module[:100]}") from None
            if found is None:
                raise CheckpointError(f"{self.weights}: {module[:100]} is no linear layer of the model")
            if found != (layer.inputs, layer.outputs):
                raise CheckpointError(
                    f"{self.weights}: {module[:100]} maps {found[0]} values to {found[1]} in the model, "
                    f"and {layer.inputs} to {layer.outputs} in the adapter"
                )

    def check_numbers(self) -> None:
        """Read all of it. Raises CheckpointError where a number is NaN or infinite."""
        with _opened(self.weights) as read:
            for name in self.tensors:
                self._check_finite(name, read(name))

    def load(
        self, family: Family, model: nn.Module, start: int, end: int, *, device: torch.device, dtype: torch.dtype
    ) -> dict[str, Lora]:
        """The layers of these units, ready to be added to those of `model`, read from the file. Raises CheckpointError."""
        self.check(family, model, start, end)
        loras: dict[str, Lora] = {}
        with _opened(self.weights) as read:
            for module, layer in self.layers_of(family, start, end).items():
                # Scaled once, and before it is rounded.
                a_RI, b_OR = read(layer.a).to(dtype), (read(layer.b).float() * self.config.scale).to(dtype)
                for name, matrix in ((layer.a, a_RI), (layer.b, b_OR)):
                    self._check_finite(name, matrix)
                loras[module] = Lora(a_RI.to(device), b_OR.to(device))
        return loras

    def _check_finite(self, name: str, matrix: Tensor) -> None:
        if not bool(matrix.isfinite().all()):
            kind = str(matrix.dtype).removeprefix("torch.")
            raise CheckpointError(f"{self.weights}: {name[:100]} holds NaN or infinity in {kind}")


@contextmanager
def _opened(file: Path) -> Iterator[Callable[[str], Tensor]]:
    """The tensors of a safetensors file by their names, while the context lasts. Raises CheckpointError."""
    from safetensors import SafetensorError, safe_open

    try:
        handle: Any = safe_open(file, framework="pt")
        with handle:
            yield handle.get_tensor
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from error


def adapter_in(folder: Path) -> AdapterFile:
    """The adapter that peft has saved into a folder. Raises CheckpointError."""
    if not (folder / CONFIG_NAME).is_file():
        raise CheckpointError(f"{folder} has no {CONFIG_NAME}; an adapter that peft has saved has one")
    if not (folder / WEIGHTS_NAME).is_file():
        raise CheckpointError(
            f"{folder} has no {WEIGHTS_NAME}; save the adapter with safe_serialization (pickles are never read)"
        )
    return AdapterFile(folder / CONFIG_NAME, folder / WEIGHTS_NAME)
