"""Products of quantised matrices: by ggml if a format of GGUF holds them without loss, else some dequantised rows at a time.

Writers of GGUF's formats with one scale for each block of 32, from whole numbers and float16 scales: nothing is rounded.

The layouts are those of ggml's `block_q4_0`, `block_q5_0`, `block_q8_0` and `block_mxfp4`
(https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from swarmnode.compute.packing.ggml import FORMATS, aligned, library
from swarmnode.compute.packing.ggml_matrix import TILE_ELEMENTS, GgmlMatrix, threads
from swarmnode.compute.packing.packed_matrix import Grid, Method, PackedMatrix
from swarmnode.compute.packing.packed_weight import MatrixProducts
from swarmnode.compute.packing.quantisation_methods import Mxfp4

BLOCK = 32
_HALF = BLOCK // 2


@dataclass(frozen=True)
class WholeNumbers:
    """Format of GGUF for whole numbers from `smallest` to `largest`. `write` makes the bytes (N, B) behind the scales of blocks."""

    name: str
    smallest: int
    largest: int
    write: Callable[[Tensor], Tensor]

    def holds(self, integers_OI: Tensor) -> bool:
        """Return whether the format has all these numbers."""
        smallest, largest = (int(value) for value in torch.aminmax(integers_OI))
        return self.smallest <= smallest and largest <= self.largest

    def rows(self, integers_OI: Tensor, scales_OB: Tensor) -> Tensor:
        """Return rows (O, bytes) of numbers that the format holds, and of scales (float16) for each 32 inputs."""
        blocks_NE = integers_OI.reshape(-1, BLOCK)
        scales_N2 = scales_OB.reshape(-1, 1).contiguous().view(torch.uint8)
        return torch.cat([scales_N2, self.write(blocks_NE)], dim=1).view(len(integers_OI), -1)


def _nibbles(codes_NE: Tensor) -> Tensor:
    """Return bytes (N, 16): the lower halves hold numbers 0 to 15 of a block, the upper ones numbers 16 to 31."""
    return codes_NE[:, :_HALF] | codes_NE[:, _HALF:] << 4


def _five_bits(blocks_NE: Tensor) -> Tensor:
    codes_NE = (blocks_NE + 16).to(torch.uint8)
    highest_NE = (codes_NE >> 4).view(-1, 4, 8)
    highest_N4 = highest_NE[:, :, 0].clone()
    for place in range(1, 8):
        highest_N4 |= highest_NE[:, :, place] << place
    return torch.cat([highest_N4, _nibbles(codes_NE & 0xF)], dim=1)


def _four_bits(blocks_NE: Tensor) -> Tensor:
    return _nibbles((blocks_NE + 8).to(torch.uint8))


def _eight_bits(blocks_NE: Tensor) -> Tensor:
    return blocks_NE.to(torch.int8).view(torch.uint8)


WHOLE_NUMBERS = (
    WholeNumbers("Q4_0", -8, 7, _four_bits),
    WholeNumbers("Q5_0", -16, 15, _five_bits),
    WholeNumbers("Q8_0", -128, 127, _eight_bits),
)
"""Formats for whole numbers, the smallest first"""


def mxfp4_rows(blocks_OGB: Tensor, scales_OG: Tensor) -> Tensor:
    """Return MXFP4 as GGUF has it (O, bytes), from blocks (O, I/32, 16) whose bytes hold neighbours, and their exponents."""
    codes_OGE = torch.stack([blocks_OGB & 0xF, blocks_OGB >> 4], -1).flatten(-2)
    bytes_NB = _nibbles(codes_OGE.view(-1, BLOCK))
    return torch.cat([scales_OG.reshape(-1, 1), bytes_NB], dim=1).view(len(blocks_OGB), -1)


LARGEST_GROWTH = 1.5  # of the bytes in memory over those in the file: a larger format is not worth its faster products


class TiledMatrix:
    """Matrix (O, I) that keeps the bytes of its file. To multiply, it dequantises as many rows as the processor's cache holds."""

    has_rows = True

    def __init__(self, method: Method, matrix: PackedMatrix) -> None:
        self.name = type(method).__name__
        self.outputs, self.inputs = method.shape(matrix)
        self._method, self._matrix = method, matrix
        self.nbytes = self._matrix.nbytes
        self._cuts = list(_cuts(method, matrix, self.outputs, self.inputs))

    def multiply(self, x_RI: Tensor) -> Tensor:
        """Return y (R, O) for x (R, I), both float32."""
        if library() is not None and (recorder := threads().recorder) is not None:
            whole_RO: Tensor = recorder.calling(self.multiply, x_RI)  # else the program would keep dequantised weights
            return whole_RO
        y_RO = torch.empty(len(x_RI), self.outputs)
        for first, last in self._cuts:
            rows = self._method.rows(self._matrix, first, last)
            torch.mm(x_RI, self._method.dequantize(rows).t(), out=y_RO[:, first:last])
        return y_RO

    def rows(self, numbers_N: Tensor) -> Tensor:
        """Return the rows (N, I) of these numbers as float32."""
        found_NI = torch.empty(len(numbers_N), self.inputs)
        for first, last in self._cuts:
            here_N = (first <= numbers_N) & (numbers_N < last)
            if here_N.any():
                tile_OI = self._method.dequantize(self._method.rows(self._matrix, first, last))
                found_NI[here_N] = tile_OI[numbers_N[here_N] - first]
        return found_NI


class OrderedMatrix:
    """Matrix whose inputs are in another order than those of `matrix`: input i of that one is input order_I[i] here."""

    def __init__(self, matrix: MatrixProducts, order_I: Tensor) -> None:
        self.name, self.outputs, self.inputs = matrix.name, matrix.outputs, matrix.inputs
        self._matrix, self._order_I = matrix, order_I.int()
        self.has_rows = matrix.has_rows
        self.nbytes = matrix.nbytes + self._order_I.nbytes

    def multiply(self, x_RI: Tensor) -> Tensor:
        """Return y (R, O) for x (R, I), both float32."""
        return self._matrix.multiply(x_RI.index_select(1, self._order_I))

    def rows(self, numbers_N: Tensor) -> Tensor:
        """Return the rows (N, I) of these numbers as float32."""
        found_NI = torch.empty(len(numbers_N), self.inputs)
        found_NI[:, self._order_I] = self._matrix.rows(numbers_N)
        return found_NI


class ScaledMatrix:
    """Matrix whose row o is that of `matrix` times scales_O[o]."""

    def __init__(self, matrix: MatrixProducts, scales_O: Tensor) -> None:
        self.name, self.outputs, self.inputs = matrix.name, matrix.outputs, matrix.inputs
        self._matrix, self._scales_O = matrix, scales_O
        self.has_rows = matrix.has_rows
        self.nbytes = matrix.nbytes + scales_O.nbytes

    def multiply(self, x_RI: Tensor) -> Tensor:
        """Return y (R, O) for x (R, I), both float32."""
        return self._matrix.multiply(x_RI).mul_(self._scales_O)

    def rows(self, numbers_N: Tensor) -> Tensor:
        """Return the rows (N, I) of these numbers as float32."""
        return self._matrix.rows(numbers_N) * self._scales_O[numbers_N, None]


def packed_matrix(method: Method, matrix: PackedMatrix, *, exact: bool) -> MatrixProducts:
    """Return the matrix (O, I) for products; its tensors are copied or rewritten. Raises CheckpointError if they do not fit."""
    outputs, inputs = method.shape(matrix)
    if inputs % BLOCK == 0:
        for form in WHOLE_NUMBERS:
            if outputs * FORMATS[form.name].row_bytes(inputs) > LARGEST_GROWTH * matrix.nbytes:
                break
            if (written := _written(form, method, matrix, exact=exact)) is not None:
                return written
    return TiledMatrix(method, matrix)


def packed_experts(method: Mxfp4, matrix: PackedMatrix, *, exact: bool) -> Iterator[MatrixProducts]:
    """Yield the matrices (O, I) of a layer's experts in MXFP4. Raises CheckpointError if the tensors do not fit together."""
    _, outputs, inputs = method.shape(matrix)
    form = FORMATS["MXFP4"]
    for blocks_OGB, scales_OG in zip(matrix.packed, matrix["_scales"], strict=True):
        rows_OB = aligned(outputs * form.row_bytes(inputs)).view(outputs, -1)
        rows_OB.copy_(mxfp4_rows(blocks_OGB, scales_OG))
        yield GgmlMatrix(rows_OB, form, inputs, exact=exact)


def _cuts(method: Method, matrix: PackedMatrix, outputs: int, inputs: int) -> Iterator[tuple[int, int]]:
    """Yield the rows [first, last) of tiles of about TILE_ELEMENTS numbers."""
    step = method.step(matrix)
    height = max(step, TILE_ELEMENTS // inputs // step * step)
    for first in range(0, outputs, height):
        yield first, min(first + height, outputs)


@dataclass(frozen=True)
class _Blocks:
    """Groups of a matrix's blocks of 32 inputs, and the order of inputs that makes each group whole; None: the order is kept."""

    group_B: Tensor
    order_I: Tensor | None

    @classmethod
    def of(cls, group_I: Tensor) -> _Blocks | None:
        """Return the groups of blocks; None if a block lies in several groups in any order."""
        for order_I in (None, torch.argsort(group_I, stable=True)):
            blocks_BE = (group_I if order_I is None else group_I[order_I]).view(-1, BLOCK)
            if (blocks_BE == blocks_BE[:, :1]).all():
                return cls(blocks_BE[:, 0], order_I)
        return None


def _written(form: WholeNumbers, method: Method, matrix: PackedMatrix, *, exact: bool) -> MatrixProducts | None:
    """Return the matrix in a format of GGUF; None if that would change a value."""
    outputs, inputs = method.shape(matrix)
    kind = FORMATS[form.name]
    rows_OB = aligned(outputs * kind.row_bytes(inputs)).view(outputs, -1)
    scales_O = torch.ones(outputs)
    blocks: _Blocks | None = None
    for first, last in _cuts(method, matrix, outputs, inputs):
        grid = method.grid(method.rows(matrix, first, last))
        blocks = blocks or (None if grid is None else _Blocks.of(grid.group_I))
        if grid is None or blocks is None or not form.holds(grid.integers_OI):
            return None
        if grid.scales_OG.shape[1] == 1:
            scales_O[first:last] = grid.scales_OG[:, 0]
            grid = Grid(grid.integers_OI, torch.ones_like(grid.scales_OG), grid.group_I)
        halves_OG = grid.scales_OG.half()
        if not torch.equal(halves_OG.float(), grid.scales_OG):
            return None
        integers_OI = grid.integers_OI if blocks.order_I is None else grid.integers_OI[:, blocks.order_I]
        rows_OB[first:last] = form.rows(integers_OI, halves_OG[:, blocks.group_B])
    found: MatrixProducts = GgmlMatrix(rows_OB, kind, inputs, exact=exact)
    if not (scales_O == 1).all():
        found = ScaledMatrix(found, scales_O)
    return found if blocks is None or blocks.order_I is None else OrderedMatrix(found, blocks.order_I)
