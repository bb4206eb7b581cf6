"""Methods of quantisation: whole numbers with scales (GPTQ, AWQ, compressed-tensors, int8), FP8, 4 bits of bitsandbytes, MXFP4."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from swarmnode.compute.packing.packed_matrix import Grid, Method, PackedMatrix, combine, in_order
from swarmnode.errors import CheckpointError
from swarmnode.files import parse_json

WORD_BITS = 32
AWQ_BITS = 4
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # place of columns 0, 1, … among a word's eight values
INT8_LARGEST = 127


def unpack(words_WC: Tensor, bits: int) -> Tensor:
    """Return values_VC of a stream of `bits` each, lowest bits first, along dimension 0; a value may lie across two words.

    They are int16 if a byte holds whole values, which takes a tenth of the time, else int64.
    """
    if 8 % bits == 0:
        bytes_WBC = (
            words_WC.contiguous().flatten().view(torch.uint8).view(*words_WC.shape, WORD_BITS // 8).transpose(1, 2)
        )
        parts = [bytes_WBC >> shift & ((1 << bits) - 1) for shift in range(0, 8, bits)]
        return torch.stack(parts, 2).reshape(-1, words_WC.shape[1]).short()
    words = words_WC.long() & 0xFFFFFFFF
    following = torch.cat([words[1:], torch.zeros_like(words[:1])])
    first_bit = torch.arange(words.shape[0] * WORD_BITS // bits) * bits
    word, shift = first_bit // WORD_BITS, (first_bit % WORD_BITS)[:, None]
    return (words[word] >> shift | following[word] << (WORD_BITS - shift)) & ((1 << bits) - 1)


def unpack_rows(words_OW: Tensor, bits: int) -> Tensor:
    """Return the values (O, V) of streams along dimension 1, as `unpack` does of those along dimension 0."""
    if 8 % bits != 0:
        return unpack(words_OW.mT, bits).mT
    bytes_OB = words_OW.contiguous().view(torch.uint8)
    parts = [bytes_OB >> shift & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    return torch.stack(parts, 2).flatten(1).short()


def _unpacked(matrix: PackedMatrix, words: Tensor, bits: int) -> Tensor:
    whole = words.dtype == torch.int32 and words.ndim == 2 and words.shape[0] * WORD_BITS % bits == 0
    matrix.require(whole, f"not a matrix of {bits} bits packed into int32")
    return unpack(words, bits)


def _check_groups(matrix: PackedMatrix, group_I: Tensor, inputs: int, groups: int, *, listed: bool) -> None:
    """Check the group of each input, which the checkpoint has `listed`, or which follow from the size of groups."""
    fits = group_I.shape == (inputs,) and int(group_I.min()) >= 0 and int(group_I.max()) < groups
    matrix.require(fits, "its inputs are of groups that have no scales")
    matrix.require(
        listed or int(group_I.max()) == groups - 1, "its scales are of smaller groups than its group_size says"
    )


class _IntegerMethod(Method):
    """Method whose matrices are whole numbers and scales.

    `axes` has the dimension of the outputs for the packed tensor ("") and for companions; `step_rows` rows are cut out together.
    """

    axes: ClassVar[Mapping[str, int]]
    step_rows: ClassVar[int] = WORD_BITS

    def step(self, _matrix: PackedMatrix) -> int:
        return self.step_rows

    def rows(self, matrix: PackedMatrix, first: int, last: int) -> PackedMatrix:
        return matrix.cut(self.axes, first, last, self.shape(matrix)[0])

    def dequantize(self, matrix: PackedMatrix) -> Tensor:
        self.shape(matrix)
        return self.grid(matrix).values()

    def grid(self, matrix: PackedMatrix) -> Grid:
        """Return the matrix as whole numbers and scales."""
        raise NotImplementedError


@dataclass(frozen=True)
class _ByColumns(_IntegerMethod):
    """Matrix whose outputs lie along dimension 1: qweight, qzeros_GO, packed along outputs, and scales_GO."""

    axes: ClassVar[Mapping[str, int]] = {"": 1, ".qzeros": 1, ".scales": 1}
    bits: int = AWQ_BITS

    def shape(self, matrix: PackedMatrix) -> tuple[int, ...]:
        inputs, outputs = self._size(matrix)
        zeros, scales = matrix[".qzeros"], matrix[".scales"]
        whole = zeros.dtype == torch.int32 and zeros.ndim == 2 and zeros.shape[1] * WORD_BITS == outputs * self.bits
        fits = whole and scales.shape == (len(zeros), outputs)
        matrix.require(fits and scales.is_floating_point(), "scales and zero points do not fit the matrix")
        group_I = self._groups(matrix, inputs)
        _check_groups(matrix, group_I, inputs, len(scales), listed=".g_idx" in matrix.beside)
        return outputs, inputs

    def _size(self, matrix: PackedMatrix) -> tuple[int, int]:
        """Return the inputs and outputs of the packed tensor."""
        raise NotImplementedError

    def _groups(self, matrix: PackedMatrix, inputs: int) -> Tensor:
        group_I = matrix.beside.get(".g_idx")
        return in_order(inputs, int(group_size_of(matrix.settings))) if group_I is None else group_I.long()

    def _grid(self, matrix: PackedMatrix, values_IO: Tensor, zeros_GO: Tensor) -> Grid:
        group_I = self._groups(matrix, len(values_IO))
        integers_OI = combine(torch.sub, values_IO.mT, zeros_GO.mT, group_I)
        return Grid(integers_OI, matrix[".scales"].float().mT, group_I)


def one_of(settings: Mapping[str, Any], name: str, other: str, default: Any) -> Any:
    """Return the value of a setting that has two names, or `default` under neither. Raises ValueError if the two disagree."""
    values = [settings[key] for key in (name, other) if settings.get(key) is not None]
    if any(value != values[0] for value in values):
        raise ValueError(f"its {name} is {str(values[0])[:40]!r}, but its {other} is {str(values[1])[:40]!r}")
    return values[0] if values else default


def gptq_format(settings: Mapping[str, Any]) -> str:
    """Return the format of GPTQ files, "gptq" unless named. Raises ValueError if its two names disagree."""
    return str(one_of(settings, "checkpoint_format", "format", "gptq")).lower()


def group_size_of(settings: Mapping[str, Any]) -> Any:
    """Return the number of inputs that share a scale; -1 for all of them. Raises ValueError if its two names disagree."""
    return one_of(settings, "group_size", "q_group_size", -1)


class Gptq(_ByColumns):
    """GPTQ: qweight is packed along inputs. g_idx_I gives each input's group, if inputs are not in their groups' order. Version 1
    stores zero points less one."""

    def _size(self, matrix: PackedMatrix) -> tuple[int, int]:
        words = matrix.packed
        whole = words.dtype == torch.int32 and words.ndim == 2 and words.shape[0] * WORD_BITS % self.bits == 0
        matrix.require(whole, f"not a matrix of {self.bits} bits packed into int32")
        return words.shape[0] * WORD_BITS // self.bits, words.shape[1]

    def grid(self, matrix: PackedMatrix) -> Grid:
        ordered = (
            ".g_idx" in matrix.beside or not matrix.settings.get("desc_act") or matrix.settings.get("static_groups")
        )
        matrix.require(bool(ordered), "its config says that inputs are reordered (desc_act), but it has no g_idx")
        values_IO = _unpacked(matrix, matrix.packed, self.bits)
        zeros_GO = _unpacked(matrix, matrix[".qzeros"].mT, self.bits).mT
        if matrix.settings.get("sym") is True:
            middle = 1 << self.bits - 1  # some writers store it as it is, others less one, whichever version they name
            fits = bool((zeros_GO == zeros_GO[0, 0]).all()) and int(zeros_GO[0, 0]) in (middle, middle - 1)
            matrix.require(fits, f"its config says that it is symmetric (sym), but its zero points are not {middle}")
            zeros_GO = torch.full_like(zeros_GO, middle)
        elif gptq_format(matrix.settings) == "gptq":
            zeros_GO = (zeros_GO + 1) & ((1 << self.bits) - 1)
        return self._grid(matrix, values_IO, zeros_GO)


class Awq(_ByColumns):
    """AWQ: qweight_IO and qzeros_GO are both packed along outputs, in AWQ's own order."""

    def _size(self, matrix: PackedMatrix) -> tuple[int, int]:
        words = matrix.packed
        matrix.require(words.dtype == torch.int32 and words.ndim == 2, "not a matrix of 4 bits packed into int32")
        return words.shape[0], words.shape[1] * WORD_BITS // AWQ_BITS

    def grid(self, matrix: PackedMatrix) -> Grid:
        values_IO, zeros_GO = (
            _unpacked(matrix, packed.mT, AWQ_BITS).unflatten(0, (-1, 8))[:, list(AWQ_ORDER)].flatten(0, 1).mT
            for packed in (matrix.packed, matrix[".qzeros"])
        )
        return self._grid(matrix, values_IO, zeros_GO)


@dataclass(frozen=True)
class CompressedIntegers(_IntegerMethod):
    """compressed-tensors, pack-quantized: weight_packed is packed along inputs, with an offset of half the range, and so are zero
    points along outputs. weight_shape holds (O, I), weight_g_idx each input's group. Groups have `group_size` inputs; 0: all."""

    axes: ClassVar[Mapping[str, int]] = {"": 0, ".weight_scale": 0, ".weight_zero_point": 0}
    bits: int = 4
    group_size: int = 0

    def shape(self, matrix: PackedMatrix) -> tuple[int, ...]:
        stored, words, scales = matrix[".weight_shape"], matrix.packed, matrix[".weight_scale"]
        matrix.require(stored.shape == (2,) and not stored.is_floating_point(), "its weight_shape is damaged")
        outputs, inputs = matrix.outputs or int(stored[0]), int(stored[1])
        whole = outputs > 0 and inputs > 0 and words.shape == (outputs, -(-inputs * self.bits // WORD_BITS))
        matrix.require(whole and words.dtype == torch.int32, f"not a matrix of {self.bits} bits packed into int32")
        fits = scales.is_floating_point() and scales.ndim == 2 and scales.shape[0] in (1, outputs)
        zeros = matrix.beside.get(".weight_zero_point")
        packed_zeros = (-(-outputs * self.bits // WORD_BITS), scales.shape[-1])
        fits &= zeros is None or (zeros.dtype == torch.int32 and zeros.shape == packed_zeros)
        matrix.require(fits, "scales and zero points do not fit the matrix")
        group_I = self._groups(matrix, inputs)
        _check_groups(matrix, group_I, inputs, scales.shape[1], listed=".weight_g_idx" in matrix.beside)
        return outputs, inputs

    def _groups(self, matrix: PackedMatrix, inputs: int) -> Tensor:
        group_I = matrix.beside.get(".weight_g_idx")
        return in_order(inputs, self.group_size) if group_I is None else group_I.long()

    def grid(self, matrix: PackedMatrix) -> Grid:
        outputs, inputs = self.shape(matrix)
        group_I = self._groups(matrix, inputs)
        values_OI = unpack_rows(matrix.packed, self.bits)[:, :inputs]
        zeros = matrix.beside.get(".weight_zero_point")
        if zeros is None:
            integers_OI = values_OI - (1 << self.bits - 1)
        else:
            integers_OI = combine(torch.sub, values_OI, unpack(zeros, self.bits)[:outputs], group_I)
        return Grid(integers_OI, matrix[".weight_scale"].float().expand(outputs, -1), group_I)


@dataclass(frozen=True)
class Bytes(_IntegerMethod):
    """int8 numbers: with the largest absolute value of each row (SCB, bitsandbytes), or with scales of the matrix or its rows and
    perhaps zero points (compressed-tensors)."""

    axes: ClassVar[Mapping[str, int]] = {"": 0, ".SCB": 0, ".weight_scale": 0, ".weight_zero_point": 0}
    step_rows = 1

    def shape(self, matrix: PackedMatrix) -> tuple[int, ...]:
        outputs = len(matrix.packed)
        fits = matrix.packed.ndim == 2 and self._scales(matrix).shape in ((outputs, 1), (1, 1))
        matrix.require(fits, "its scales do not fit it")
        zeros = matrix.beside.get(".weight_zero_point")
        matrix.require(zeros is None or zeros.numel() in (1, outputs), "its zero points do not fit it")
        outputs, inputs = matrix.packed.shape
        return outputs, inputs

    def _scales(self, matrix: PackedMatrix) -> Tensor:
        if ".SCB" in self.beside:
            return matrix[".SCB"].float().view(-1, 1) / INT8_LARGEST
        return matrix[".weight_scale"].float().view(-1, 1)

    def grid(self, matrix: PackedMatrix) -> Grid:
        integers_OI, zeros = matrix.packed.short(), matrix.beside.get(".weight_zero_point")
        if zeros is not None:
            integers_OI = integers_OI - zeros.view(-1, 1)
        scales_OG = self._scales(matrix).expand(len(integers_OI), 1)
        return Grid(integers_OI, scales_OG, in_order(integers_OI.shape[1], 0))


def settings_of_groups(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return how compressed-tensors packs all its weights. Raises ValueError if its groups differ, or say nothing."""
    groups = [group["weights"] for group in settings["config_groups"].values() if group.get("weights")]
    kinds = [{key: each.get(key) for key in ("num_bits", "type", "group_size", "block_structure")} for each in groups]
    if not kinds or any(kind != kinds[0] for kind in kinds):
        raise ValueError("its groups of layers are quantised in different ways")
    return {**kinds[0], "symmetric": all(each.get("symmetric", True) for each in groups)}


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
        # Moved by bits the numbers are float16, which takes a fifteenth of the time of torch's conversion. NaN is not kept.
        bits, scale = matrix.packed.view(torch.int8).short(), scale.float()
        if matrix.packed.dtype is torch.float8_e5m2:
            bits.bitwise_left_shift_(8)
        else:
            bits.bitwise_left_shift_(7).bitwise_and_(~0x4000)
            scale = scale * 256.0  # the exponents' bias is 7 instead of 15
        values = bits.view(torch.float16).float()
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
