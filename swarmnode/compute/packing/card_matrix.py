"""Packed matrices on a card: they stay in the file's bytes there, and are multiplied in the model's dtype.

A few rows are multiplied by a Triton kernel that makes the values on the way. For more rows, and without Triton, tiles of the
matrix are dequantised and go through the card's own products. Either way the numbers are those of the dequantised matrix,
rounded to the model's dtype as a plain one is, and a row does not depend on the others of its pass. Which way a matrix takes is
found by timing at load, once per kind of matrix in a process.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from swarmnode.compute.executor import card_answers
from swarmnode.compute.packing.block_values import values_of
from swarmnode.compute.packing.ggml import DTYPES, FORMATS, Format

log = logging.getLogger(__name__)

TRITON = "triton"  # the package
FEW_ROWS = 32  # most rows of a kernel's product: they need the weights' values as often as there are tiles of rows
TILE_ELEMENTS = 1 << 24  # dequantised at once
TORCH_ELEMENTS = 1 << 20  # the same by torch's operators, which need several values of four bytes for each
TORCH_BYTES = 24  # per element: codes as bytes, as numbers and times their scale, some of them twice
TIMED_ROWS = (1, 8, 32)
TURNS = 3
MATRICES_TIMED = 8  # of a kind: in turn, since one alone would lie in the card's cache


class MatrixKind(NamedTuple):
    """Key of a choice: matrices of one kind are multiplied in one way."""

    form: str
    outputs: int
    inputs: int
    dtype: torch.dtype
    device: str


Product = Callable[["CardMatrix", Tensor], Tensor]
"""Function for a product: matrix (O, I), x (R, I) -> y (R, O)"""

_choices: dict[MatrixKind, Product] = {}


@functools.cache
def kernels(device: torch.device) -> ModuleType | None:
    """Return the Triton kernels; None if the package triton is not installed, or cannot make kernels for this device."""
    if device.type != "cuda" or importlib.util.find_spec(TRITON) is None:
        return None
    from swarmnode.compute.packing import triton_kernels

    form = FORMATS["Q8_0"]
    zeros_B = torch.zeros(form.block_bytes, dtype=torch.uint8, device=device)
    try:
        triton_kernels.values(zeros_B, form, form.block, 1, torch.float32)
    except Exception as error:  # it needs a C compiler, a card that it knows, and a folder that it may write to
        if not card_answers():
            raise
        log.warning(
            "Triton cannot make kernels for %s (%s): packed weights are slower", device, str(error).partition("\n")[0]
        )
        return None
    return triton_kernels


class CardMatrix:
    """Matrix (O, I) in a packed format on a device, for a model that computes in `dtype`.

    It works on any device, but on CPUs other products are faster (`ggml.py`).
    """

    has_rows = True

    def __init__(self, packed_OB: Tensor, form: Format, inputs: int, dtype: torch.dtype, device: torch.device) -> None:
        self.form, self.outputs, self.inputs, self.dtype = form, len(packed_OB), inputs, dtype
        self.name, self.nbytes = form.name, packed_OB.nbytes
        self._memory = packed_OB.reshape(-1).to(device)
        stored = DTYPES.get(form.name)
        if stored is not None and stored.itemsize >= dtype.itemsize:
            self._memory = self._memory.view(stored).to(dtype).view(torch.uint8)
            stored = dtype
        self._stored = stored  # the dtype of a format that is one
        self.product: Product = tiled

    def __repr__(self) -> str:
        return f"<CardMatrix {self.outputs}x{self.inputs} in {self.form.name} on {self.device}>"

    @property
    def device(self) -> torch.device:
        """Device that holds the matrix."""
        return self._memory.device

    @property
    def kind(self) -> MatrixKind:
        """Key of the choice of its product."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type
        return MatrixKind(self.form.name, self.outputs, self.inputs, self.dtype, name)

    @property
    def kernels(self) -> ModuleType | None:
        """Triton kernels for this matrix on its device; None if there are none."""
        return None if self._stored is not None else kernels(self.device)

    def refill(self, packed_B: Tensor, place: int = 0) -> None:
        """Take the packed bytes of other rows, in the host's memory, from byte `place` of the packed matrix on. Passes that were
        submitted before still have the bytes that were there, since the card does one after the other. Nothing waits for the card;
        the bytes may change as soon as this returns, as CUDA copies pageable memory aside first."""
        own = DTYPES.get(self.form.name)
        if own is not None and self._stored is self.dtype:  # values are kept in the model's dtype
            packed_B, place = (
                packed_B.view(own).to(self.dtype).view(torch.uint8),
                place // own.itemsize * self.dtype.itemsize,
            )
        self._memory[place : place + packed_B.nbytes].copy_(packed_B, non_blocking=True)

    def move_to(self, device: torch.device) -> None:
        """Move the bytes to another device."""
        self._memory = self._memory.to(device)

    def rows(self, numbers_N: Tensor) -> Tensor:
        """Return the rows (N, I) of these numbers in the model's dtype."""
        if (triton := self.kernels) is not None:
            values: Tensor = triton.values(self._memory, self.form, self.inputs, numbers_N, self.dtype)
            return values
        packed_NB = self._memory.view(self.outputs, -1)[numbers_N]
        if self._stored is self.dtype:
            return packed_NB.view(self.dtype)
        return self._values(packed_NB.view(-1)).view(-1, self.inputs)

    def multiply(self, x_RI: Tensor) -> Tensor:
        """Return y (R, O) for x (R, I), both in the model's dtype. Raises ValueError if x has another width or dtype."""
        if x_RI.shape[1:] != (self.inputs,) or x_RI.dtype is not self.dtype:
            raise ValueError(
                f"activations of width {self.inputs} in {self.dtype} are needed, not {tuple(x_RI.shape)} in {x_RI.dtype}"
            )
        if self._stored is self.dtype:
            return functional.linear(x_RI, self._memory.view(self.dtype).view(self.outputs, self.inputs))
        return (self.product if len(x_RI) <= FEW_ROWS else tiled)(self, x_RI)

    def tile(self, first: int, height: int) -> Tensor:
        """Return the values (height or less, I) of the rows from `first` on, in the model's dtype."""
        row_bytes = self.form.row_bytes(self.inputs)
        packed_B = self._memory[first * row_bytes : (first + height) * row_bytes]
        if (triton := self.kernels) is not None:
            count = len(packed_B) // row_bytes
            values: Tensor = triton.values(packed_B, self.form, self.inputs, count, self.dtype)
            return values
        return self._values(packed_B).view(-1, self.inputs)

    def by_kernel(self, x_RI: Tensor, *, tile: object) -> Tensor:
        """Return y (R, O) by the Triton kernel, in tiles of this size. Only if the matrix has kernels."""
        triton = self.kernels
        assert triton is not None
        y_RO: Tensor = triton.multiply(self._memory, self.form, x_RI.contiguous(), self.outputs, tile)
        return y_RO

    def _values(self, packed_B: Tensor) -> Tensor:
        return values_of(packed_B, self.form).to(self.dtype)


def tiled(matrix: CardMatrix, x_RI: Tensor) -> Tensor:
    """Return y (R, O). Some rows of the matrix are dequantised at a time."""
    most = TILE_ELEMENTS if matrix.kernels is not None else TORCH_ELEMENTS
    height = max(1, most // matrix.inputs)
    parts_RO = [functional.linear(x_RI, matrix.tile(first, height)) for first in range(0, matrix.outputs, height)]
    return parts_RO[0] if len(parts_RO) == 1 else torch.cat(parts_RO, dim=1)


def working_bytes(matrix: CardMatrix) -> int:
    """Return the most memory that a product takes besides its input and output."""
    if matrix.kernels is not None:
        return min(TILE_ELEMENTS, matrix.outputs * matrix.inputs) * matrix.dtype.itemsize
    return min(TORCH_ELEMENTS, matrix.outputs * matrix.inputs) * TORCH_BYTES


@torch.inference_mode()
def choose_products(matrices: Iterable[CardMatrix]) -> None:
    """Give each matrix the product that is fastest for a few rows of its kind on its device, over TIMED_ROWS together.

    One product serves all numbers of rows up to FEW_ROWS, so that a row's sums do not depend on its company.
    """
    alike: dict[MatrixKind, list[CardMatrix]] = {}
    for matrix in matrices:
        if matrix.kernels is not None:
            alike.setdefault(matrix.kind, []).append(matrix)
    for kind, some in alike.items():
        if kind not in _choices:
            timed, triton = some[:MATRICES_TIMED], kernels(some[0].device)
            assert triton is not None
            rivals: list[Product] = [tiled]
            for tile in triton.TILES:
                product = functools.partial(CardMatrix.by_kernel, tile=tile)
                try:
                    _time_s(product, timed[:1], 1)
                except triton.FAILURES as error:
                    log.info("%r cannot be multiplied in %s: %s", timed[0], tile, str(error).partition("\n")[0])
                else:
                    rivals.append(product)
            times_s = [sum(_time_s(product, timed, rows) for rows in TIMED_ROWS) for product in rivals]
            _choices[kind] = rivals[times_s.index(min(times_s))]
        for matrix in some:
            matrix.product = _choices[kind]


def _time_s(product: Product, matrices: Sequence[CardMatrix], rows: int) -> float:
    """Return the card's least seconds for the products of these matrices, one after another. The first turn compiles."""
    first = matrices[0]
    x_RI = torch.ones(rows, first.inputs, dtype=first.dtype, device=first.device)
    best_s = float("inf")
    for turn in range(TURNS + 1):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.device(first.device):
            began.record()
            for matrix in matrices:
                product(matrix, x_RI)
            ended.record()
        ended.synchronize()
        if turn:
            best_s = min(best_s, began.elapsed_time(ended) / 1e3)
    return best_s
