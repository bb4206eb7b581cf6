"""What low-rank compressors (`power_sgd.py`, `acp_sgd.py`) share: matrices as products of two factors, one of which is orthonormal.

Shape letters: N elements of a tensor; O rows and I columns of a matrix, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Size, Tensor

from swarmnode.codec.tensors import Codec
from swarmnode.compute.training.averaging.flat import FlatVector
from swarmnode.compute.training.averaging.gradient_compressor import GradientCompressor
from swarmnode.compute.training.averaging.round import Round
from swarmnode.errors import CheckpointError
from swarmnode.swarm.records.run import Averaging


def basis_of(product_OR: Tensor) -> Tensor:
    """Orthonormal columns, the same on all members: on the CPU in float64, since devices differ in columns that are nearly zero."""
    basis_OR: Tensor = torch.linalg.qr(product_OR.to("cpu", torch.float64)).Q
    return basis_OR.to(product_OR)


def is_worth(shape: Size, rank: int) -> bool:
    """Whether factors are smaller than the tensor, taken as a matrix of its first size."""
    if len(shape) < 2 or not shape.numel():
        return False
    rows, columns = shape[0], shape.numel() // shape[0]
    return rank * (rows + columns) < rows * columns


def first_factor(shape: Size, rank: int, place: int) -> Tensor:
    """Random, but the same on all members."""
    generator = torch.Generator().manual_seed(place)
    return torch.randn(shape.numel() // shape[0], rank, generator=generator)


class LowRankCompressor(GradientCompressor):
    """`_matrices` are the places of the tensors that gain by factors, `_others` of those that travel as they are."""

    def __init__(self, averaging: Averaging, shapes: Sequence[Size]) -> None:
        super().__init__(averaging, shapes)
        places = range(len(shapes))
        self._matrices = [place for place in places if is_worth(shapes[place], averaging.rank)]
        self._others = [place for place in places if place not in set(self._matrices)]

    def _first_factor(self, place: int) -> Tensor:
        return first_factor(self.shapes[place], self.averaging.rank, place)

    def _check_factor(self, place: int, factor: Tensor, size: int) -> None:
        """Raises CheckpointError where a kept one is not of so many rows or columns of its matrix."""
        if factor.shape != (size, self.averaging.rank):
            raise CheckpointError(f"a factor of shape {tuple(factor.shape)} for tensor {place} of another run")


def factor_name(place: int) -> str:
    """Of what is remembered of a matrix."""
    return f"factor/{place}"


class Wanted:
    """What a member has to say, by tensor: its own values and what it could not say before, which are never added up whole."""

    def __init__(self, tensors: Sequence[Tensor], residuals: Sequence[Tensor] | None, shapes: Sequence[Size]) -> None:
        self._sources = [tensors] if residuals is None else [tensors, residuals]
        self._shapes = shapes

    def __repr__(self) -> str:
        return f"Wanted({len(self._shapes)} tensors)"

    def vector(self, place: int) -> Tensor:
        """A small tensor, in memory of its own."""
        return sum((source[place] for source in self._sources[1:]), self._sources[0][place].clone())

    def matrix_times(self, place: int, factor_IR: Tensor) -> Tensor:
        """product_OR."""
        products = [matrix_OI @ factor_IR for matrix_OI in self._matrices(place)]
        return sum(products[1:], products[0])

    def transposed_times(self, place: int, basis_OR: Tensor) -> Tensor:
        """product_IR."""
        products = [matrix_OI.T @ basis_OR for matrix_OI in self._matrices(place)]
        return sum(products[1:], products[0])

    def write(self, place: int, out_OI: Tensor) -> None:
        """The matrix itself."""
        own, *more = self._matrices(place)
        out_OI.copy_(own)
        for matrix_OI in more:
            out_OI.add_(matrix_OI)

    def add_to(self, place: int, out_N: Tensor) -> None:
        """Add the tensor itself."""
        for source in self._sources:
            out_N.add_(source[place])

    def _matrices(self, place: int) -> list[Tensor]:
        return [source[place].view(self._shapes[place][0], -1) for source in self._sources]


class SmallRound:
    """A round of tensors that are small enough to be kept three times: as wanted, as summed, and what was lost of them."""

    def __init__(self, tensors: Sequence[Tensor], weight: float, codec: Codec) -> None:
        self._tensors = [tensor.contiguous() for tensor in tensors]
        self._totals = [torch.zeros_like(tensor) for tensor in self._tensors]
        self._left = [torch.zeros_like(tensor) for tensor in self._tensors]
        self.round = Round(
            FlatVector(self._tensors), FlatVector(self._totals), weight, codec, left_over=FlatVector(self._left)
        )

    def __repr__(self) -> str:
        return f"SmallRound({self.round!r})"

    def totals(self) -> list[Tensor]:
        """What all said, in the shapes of the tensors."""
        return self._totals

    def left_over(self) -> list[Tensor]:
        """What this member did not say."""
        return self._left

    def transmitted(self) -> list[Tensor]:
        """What it did say."""
        return [tensor - left for tensor, left in zip(self._tensors, self._left, strict=True)]
