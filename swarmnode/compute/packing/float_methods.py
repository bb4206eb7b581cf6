"""Methods that store numbers of their own: FP8 with scales, bitsandbytes' tables of 16 numbers, and MXFP4."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from swarmnode.compute.packing.packed_matrix import Method, PackedMatrix
from swarmnode.errors import CheckpointError
from swarmnode.files import parse_json

NESTED = (".nested_absmax", ".nested_quant_map")
STATES = (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")
FOUR_BIT_VALUES, NESTED_VALUES = 16, 256
SCALES = ("_scale_inv", "_scale")  # under either name the factor that the numbers are multiplied by
CHECKED_AT_ONCE = 1 << 22
MXFP4_GROUP = 32
MXFP4_BIAS = 127
MXFP4_NAN = 255
MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Fp8(Method):
    """float8 numbers and their scales: of the matrix, of each row, or of blocks of `block` (outputs, inputs).

    A scale of fewer than two dimensions is the whole matrix's, or one for each row.
    """

    block: tuple[int, int] | None = None

    def _scale(self, matrix: PackedMatrix) -> tuple[str, Tensor]:
        """Return the scales with as many dimensions as the numbers, and their suffix."""
        name = SCALES[1] if SCALES[1] in matrix.beside else SCALES[0]
        scale = matrix[name]
        if scale.dtype is torch.uint8:  # exponents of two of the OCP's formats, as MXFP8's files name them
            scale = scale.view(torch.float8_e8m0fnu)
        matrix.require(scale.is_floating_point() and matrix.packed.ndim >= 2, f"its {name[1:]} is {scale.dtype}")
        if scale.ndim == 1 and scale.numel() > 1:
            scale = scale[:, None]
        return name, scale.view((1,) * (matrix.packed.ndim - scale.ndim) + tuple(scale.shape))

    def shape(self, matrix: PackedMatrix) -> tuple[int, ...]:
        _, scale = self._scale(matrix)
        ndim = matrix.packed.ndim
        for dimension, (size, count) in enumerate(zip(matrix.packed.shape, scale.shape, strict=True)):
            length = self._block_length(dimension - ndim, size, count)
            matrix.require(size > 0 and count > 0 and -(-size // length) == count, "its scales do not fit the matrix")
        return tuple(matrix.packed.shape)

    def _block_length(self, dimension: int, size: int, count: int) -> int:
        """Return how many numbers of a dimension (-1 is the last) share a scale; the last block may be shorter."""
        if count in (1, size) or dimension < -2 or self.block is None:
            return max(1, -(-size // max(count, 1)))
        return self.block[dimension]

    def step(self, matrix: PackedMatrix) -> int:
        count = self._scale(matrix)[1].shape[-2]
        return 1 if count == 1 else self._block_length(-2, matrix.packed.shape[-2], count)

    def rows(self, matrix: PackedMatrix, first: int, last: int) -> PackedMatrix:
        name, scale = self._scale(matrix)
        if len(scale) > 1:
            length = self.step(matrix)
            scale = scale[first // length : -(-last // length)]
        return replace(matrix, packed=matrix.packed[first:last], beside={name: scale}, outputs=last - first)

    def dequantize(self, matrix: PackedMatrix) -> Tensor:
        if matrix.outputs is None:
            self.shape(matrix)
        _, scale = self._scale(matrix)
        values, power = _float8(matrix.packed)
        scale = scale.float() * power
        for dimension, size in enumerate(values.shape[:-1]):
            if scale.shape[dimension] > 1:
                length = self._block_length(dimension - values.ndim, size, scale.shape[dimension])
                scale = scale.repeat_interleave(length, dimension).narrow(dimension, 0, size)
        inputs, groups = values.shape[-1], scale.shape[-1]
        length = self._block_length(-1, inputs, groups)
        if length * groups == inputs:
            values.unflatten(-1, (groups, length)).mul_(scale[..., None])
            return values
        return values.mul_(scale.repeat_interleave(length, -1)[..., :inputs])

    def check_finite(self, matrix: PackedMatrix) -> None:
        name, scale = self._scale(matrix)
        super().check_finite(replace(matrix, beside={**matrix.beside, name: scale}))
        mask, first = (0x7F, 0x7F) if matrix.packed.dtype is torch.float8_e4m3fn else (0x7C, 0x7C)
        for part in matrix.packed.split(max(1, CHECKED_AT_ONCE // matrix.packed[0].numel())):
            if ((part.view(torch.uint8) & mask) == first).any():
                raise CheckpointError(
                    f"{matrix.name} holds values that are no finite numbers; fetch the checkpoint again"
                )


def _float8(packed: Tensor) -> tuple[Tensor, float]:
    """Return float8 numbers as float32, and the power of two that they must be multiplied by.

    Moved by bits they are float16 numbers, which takes a fifteenth of the time of torch's conversion. NaN is not kept.
    """
    bits = packed.view(torch.int8).short()
    if packed.dtype is torch.float8_e5m2:
        return bits.bitwise_left_shift_(8).view(torch.float16).float(), 1.0
    bits.bitwise_left_shift_(7).bitwise_and_(~0x4000)
    return bits.view(torch.float16).float(), 256.0  # the exponents' bias is 7 instead of 15


@dataclass(frozen=True)
class FourBit(Method):
    """bitsandbytes' 4 bits: two indices into a table in each byte, the first in the upper half. Scales may be quantised
    themselves."""

    def shape(self, matrix: PackedMatrix) -> tuple[int, ...]:
        state = _state(matrix)
        shape, block = tuple(int(size) for size in state["shape"]), int(state["blocksize"])
        count = math.prod(shape)
        whole = count > 0 and block > 0 and -(-count // 2) == matrix.packed.numel()
        matrix.require(whole and matrix.packed.dtype == torch.uint8, f"it does not hold a matrix {list(shape)}")
        scales = -(-count // block)
        matrix.require(matrix[".absmax"].shape == (scales,), f"its scales are not one for {block} numbers each")
        tables = {".quant_map": FOUR_BIT_VALUES}
        if ".nested_absmax" in matrix.beside:
            tables[".nested_quant_map"] = NESTED_VALUES
            nested = int(state["nested_blocksize"])
            fits = nested > 0 and matrix[".nested_absmax"].shape == (-(-scales // max(nested, 1)),)
            matrix.require(fits, f"its scales are not one for {nested} numbers each")
        for table, values in tables.items():
            matrix.require(matrix[table].shape == (values,), f"its {table[1:]} is too short or too long")
        return shape

    def step(self, matrix: PackedMatrix) -> int:
        state = _state(matrix)
        together = 2 * int(state["blocksize"])
        if ".nested_absmax" in matrix.beside:
            together *= int(state["nested_blocksize"])
        inputs = int(state["shape"][-1])
        return math.lcm(together, inputs) // inputs

    def rows(self, matrix: PackedMatrix, first: int, last: int) -> PackedMatrix:
        state = _state(matrix)
        begin, end = (int(state["shape"][-1]) * row for row in (first, last))

        def part(tensor: Tensor, numbers: int) -> Tensor:
            return tensor.flatten()[begin // numbers : -(-end // numbers)]

        block = int(state["blocksize"])
        beside = {**matrix.beside, ".absmax": part(matrix[".absmax"], block)}
        if ".nested_absmax" in beside:
            beside[".nested_absmax"] = part(beside[".nested_absmax"], block * int(state["nested_blocksize"]))
        return replace(matrix, packed=part(matrix.packed, 2), beside=beside, outputs=last - first)

    def dequantize(self, matrix: PackedMatrix) -> Tensor:
        if matrix.outputs is None:
            self.shape(matrix)
        state = _state(matrix)
        shape = [int(size) for size in state["shape"]]
        if matrix.outputs is not None:
            shape[0] = matrix.outputs
        scales = matrix[".absmax"]
        if ".nested_absmax" in matrix.beside:
            nested, table = int(state["nested_blocksize"]), matrix[".nested_quant_map"].float()
            scales = _scaled(table[scales.int()], matrix[".nested_absmax"], nested) + float(state["nested_offset"])
        matrix.require(scales.is_floating_point(), "its scales are no numbers")
        numbers = _pairs(matrix[".quant_map"].float(), matrix.packed.flatten())[: math.prod(shape)]
        return _scaled(numbers, scales, int(state["blocksize"])).reshape(shape)


def _pairs(table_E: Tensor, bytes_N: Tensor) -> Tensor:
    """Return the numbers (2N) of two indices in each byte. Both come at once, from a table of all bytes."""
    pairs = torch.stack([table_E.repeat_interleave(len(table_E)), table_E.repeat(len(table_E))], 1)
    return pairs.view(torch.int64).flatten().index_select(0, bytes_N.int()).view(torch.float32)


def _scaled(numbers: Tensor, scales: Tensor, block: int) -> Tensor:
    """Return numbers times the scale of each `block` of them; the last one may be shorter. They are changed in place."""
    if len(numbers) == len(scales) * block:
        return numbers.view(-1, block).mul_(scales.float()[:, None]).flatten()
    return numbers.mul_(scales.float().repeat_interleave(block)[: len(numbers)])


def _state(matrix: PackedMatrix) -> dict[str, Any]:
    """Return the JSON object that is stored in the bytes of a tensor. Raises CheckpointError if it is missing or damaged."""
    raw = matrix[next((each for each in STATES if each in matrix.beside), STATES[0])]
    state = None
    with contextlib.suppress(ValueError, TypeError):
        state = parse_json(bytes(raw.tolist()))
    nested = ".nested_absmax" in matrix.beside
    wanted = {"shape", "blocksize"} | ({"nested_blocksize", "nested_offset"} if nested else set())
    matrix.require(isinstance(state, dict) and wanted <= state.keys(), "its quant_state is damaged")
    assert isinstance(state, dict)
    sizes = [*state["shape"], state["blocksize"]] if isinstance(state["shape"], list) else []
    sizes += [state["nested_blocksize"]] if nested else []
    whole = len(sizes) >= 3 and all(isinstance(size, int) and size > 0 for size in sizes)
    matrix.require(whole, "its quant_state is damaged")
    return state


@dataclass(frozen=True)
class Mxfp4(Method):
    """MXFP4 of gpt-oss: the matrices (N, O, I) of a layer's experts as blocks (N, O, I/32, 16) and scales (N, O, I/32).

    Of two numbers in a byte the first is in the lower half. Scales are powers of two. The plain weight is (N, I, O).
    """

    transposes: ClassVar[bool] = True

    def shape(self, matrix: PackedMatrix) -> tuple[int, ...]:
        blocks, scales = matrix.packed, matrix["_scales"]
        fits = blocks.dtype == scales.dtype == torch.uint8 and blocks.ndim == 4 and blocks.shape[3] == MXFP4_GROUP // 2
        matrix.require(fits and scales.shape == blocks.shape[:3], "blocks and scales do not fit together")
        count, outputs, groups = scales.shape
        return count, outputs, groups * MXFP4_GROUP

    def rows(self, matrix: PackedMatrix, first: int, last: int) -> PackedMatrix:
        """Return matrices [first, last) of the layer's experts."""
        return matrix.cut({"": 0, "_scales": 0}, first, last, len(matrix.packed))

    def dequantize(self, matrix: PackedMatrix) -> Tensor:
        """Return the plain weight (N, I, O) as float32."""
        count, outputs, inputs = self.shape(matrix)
        table = torch.tensor([*MXFP4_VALUES, *(-value for value in MXFP4_VALUES)])
        indices = torch.stack([matrix.packed & 0xF, matrix.packed >> 4], -1).flatten(-2)
        values = torch.ldexp(table[indices.int()], matrix["_scales"].int()[..., None] - MXFP4_BIAS)
        return values.view(count, outputs, inputs).mT

    def check_finite(self, matrix: PackedMatrix) -> None:
        if (matrix["_scales"] == MXFP4_NAN).any():
            raise CheckpointError(
                f"{matrix.name}: its scales hold values that are no finite numbers; fetch the checkpoint again"
            )
