"""A quantised matrix as a checkpoint stores it: its packed tensor, the tensors beside it, and the method that reads them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from swarmnode.compute.packing.tensor_entry import TensorEntry
from swarmnode.errors import CheckpointError


@dataclass(frozen=True)
class PackedMatrix:
    """Packed tensor `name` of a checkpoint, its companions by suffix (`beside`) and the quantization_config (`settings`).

    `outputs` is the number of rows that were cut out of it; None for the whole matrix.
    """

    name: str
    packed: Tensor
    beside: Mapping[str, Tensor]
    settings: Mapping[str, Any]
    outputs: int | None = None

    def __getitem__(self, suffix: str) -> Tensor:
        """Return the companion tensor with this suffix. Raises CheckpointError if the checkpoint lacks it."""
        if suffix not in self.beside:
            raise CheckpointError(
                f"{self.name} is quantised, but its {suffix.lstrip('._')} "
                "is missing in the checkpoint; fetch the checkpoint again"
            )
        return self.beside[suffix]

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return self.packed.nbytes + sum(tensor.nbytes for tensor in self.beside.values())

    def require(self, fits: bool, what: str) -> None:
        """Raise CheckpointError with `what` and the tensors' shapes, unless `fits`."""
        if not fits:
            shapes = {suffix.lstrip("._"): tuple(tensor.shape) for suffix, tensor in self.beside.items()}
            raise CheckpointError(f"{self.name} {tuple(self.packed.shape)}: {what} (beside it: {shapes})")

    def cut(self, axes: Mapping[str, int], first: int, last: int, outputs: int) -> PackedMatrix:
        """Return rows [first, last) of `outputs`. `axes` has the dimension of the outputs for the packed tensor ("") and the
        companions that have one; a size of 1 there belongs to all rows."""

        def part(suffix: str, tensor: Tensor) -> Tensor:
            axis = axes.get(suffix)
            if axis is None or tensor.ndim <= axis or tensor.shape[axis] == 1:
                return tensor
            count = tensor.shape[axis]
            begin = first * count // outputs
            return tensor.narrow(axis, begin, -(-last * count // outputs) - begin)

        beside = {suffix: part(suffix, tensor) for suffix, tensor in self.beside.items()}
        return replace(self, packed=part("", self.packed), beside=beside, outputs=last - first)


@dataclass(frozen=True)
class Grid:
    """Matrix of whole numbers and scales: its value at (o, i) is integers_OI[o, i] * scales_OG[o, group_I[i]]."""

    integers_OI: Tensor
    scales_OG: Tensor
    group_I: Tensor

    def values(self) -> Tensor:
        """Return the matrix (O, I) as float32."""
        return combine(torch.mul, self.integers_OI, self.scales_OG, self.group_I)


@dataclass(frozen=True)
class Method(ABC):
    """Method of quantisation: how its packed tensors are recognised, completed, cut by rows and dequantised.

    A packed tensor has the end `end` in its name and one of `dtypes`. Its companions have a suffix of `beside` in place of that
    end, its plain weight `plain_end`. One packed element holds `per_element` numbers. If a number takes other bytes in memory
    than in the file, `value_bytes` is their number, else 0. If it `transposes`, the plain weight is (..., I, O).
    """

    transposes: ClassVar[bool] = False

    dtypes: tuple[str, ...]
    end: str
    plain_end: str
    beside: tuple[str, ...]
    per_element: float
    value_bytes: float = 0.0

    def packs(self, name: str, entry: TensorEntry) -> bool:
        """Return whether the tensor `name` holds packed weights of this method, by its name's end and its dtype."""
        return name.endswith(self.end) and entry.dtype in self.dtypes

    def stem(self, name: str) -> str:
        """Return the part of a packed tensor's name that it shares with its companions."""
        return name.removesuffix(self.end)

    @abstractmethod
    def shape(self, matrix: PackedMatrix) -> tuple[int, ...]:
        """Return the shape (O, I) of the matrix, or (N, O, I) of several. Raises CheckpointError if its tensors do not fit
        together."""

    @abstractmethod
    def rows(self, matrix: PackedMatrix, first: int, last: int) -> PackedMatrix:
        """Return rows [first, last) of a whole matrix; `first` is a multiple of `step`, `last` too, or the end."""

    @abstractmethod
    def dequantize(self, matrix: PackedMatrix) -> Tensor:
        """Return the values as float32. Raises CheckpointError if its tensors do not fit together."""

    def step(self, _matrix: PackedMatrix) -> int:
        """Return the number of rows that can be cut out together."""
        return 1

    def grid(self, _matrix: PackedMatrix) -> Grid | None:
        """Return the matrix as whole numbers and scales; None if the method has none."""
        return None

    def check_finite(self, matrix: PackedMatrix) -> None:
        """Raise CheckpointError if a scale is no finite number."""
        for suffix, tensor in matrix.beside.items():
            if tensor.is_floating_point() and not tensor.float().isfinite().all():
                raise CheckpointError(
                    f"{matrix.name}: its {suffix.lstrip('._')} holds values that are no finite numbers: its scales are "
                    "damaged; fetch the checkpoint again"
                )


def in_order(inputs: int, size: int) -> Tensor:
    """Return group_I of inputs that lie in groups of `size`, one after the other; below 1: all are one group."""
    return torch.arange(inputs) // (size if size > 0 else inputs)


def combine(
    operation: Callable[[Tensor, Tensor], Tensor], values_OI: Tensor, each_OG: Tensor, group_I: Tensor
) -> Tensor:
    """Return operation(values_OI, each_OG[:, group_I]). Groups that lie one after the other need no copy of each_OG for this."""
    inputs, groups = len(group_I), each_OG.shape[1]
    if inputs % groups == 0 and torch.equal(group_I, in_order(inputs, inputs // groups)):
        return operation(values_OI.unflatten(1, (groups, -1)), each_OG[:, :, None]).flatten(1)
    return operation(values_OI, each_OG[:, group_I])
