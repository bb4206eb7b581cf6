"""The tensors that together stand for one matrix: the packed one, and by their suffixes those beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from swarmnode.errors import CheckpointError


@dataclass(frozen=True)
class PackedMatrix:
    """Of the tensor `name`, with the checkpoint's quantization_config."""

    name: str
    packed: Tensor
    beside: Mapping[str, Tensor]
    settings: Mapping[str, Any]

    def __getitem__(self, suffix: str) -> Tensor:
        """The tensor with this suffix. Raises CheckpointError where the checkpoint lacks it."""
        if suffix not in self.beside:
            raise CheckpointError(
                f"{self.name} is quantised, but its {suffix.lstrip('._')} is missing in the checkpoint"
            )
        return self.beside[suffix]

    def require(self, fits: bool, what: str) -> None:
        """Raises CheckpointError unless its tensors fit one another."""
        if not fits:
            shapes = {suffix.lstrip("._"): tuple(tensor.shape) for suffix, tensor in self.beside.items()}
            raise CheckpointError(f"{self.name} {tuple(self.packed.shape)}: {what} (beside it: {shapes})")
