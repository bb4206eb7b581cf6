"""Products and values of packed matrices on a card, as Triton kernels. Import it only if the package triton is there.

A kernel reads the file's bytes, makes the values of a tile in registers and multiplies them in the model's dtype, with sums in
float32. So a product reads a quarter of the bytes that it reads in bfloat16. A row's sums have the same order for any number of
rows: rows are the columns of the second matrix of a product of tiles, and no column depends on another.

Blocks are read in groups of `GROUP` values that have a scale in common; a block has `GROUPS` of them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

from swarmnode.compute.packing.block_values import TABLES, table_on
from swarmnode.compute.packing.ggml import Format

# ruff: noqa: RET505  # Triton leaves out only the branches of one statement that do not apply


ROWS_AT_ONCE = 16  # the narrowest tile of products
VALUES_TILE = 1024
GROUPS_OF_16 = ("Q2_K", "Q3_K", "Q6_K")

FAILURES = (OutOfResources,)  # of a tile that is too large for a card


class Tile(NamedTuple):
    """Part of a product that one program computes: its outputs, the inputs of one turn of its loop, and its warps."""

    outputs: int
    inputs: int
    warps: int


TILES = (Tile(16, 256, 4), Tile(16, 128, 2), Tile(32, 128, 4), Tile(64, 128, 4))
"""Tiles to choose from: for each kind of matrix the fastest is taken"""


@triton.jit
def _half(place, mask):
    """Read a float16 of whatever alignment as float32."""
    low = tl.load(place, mask, 0).to(tl.uint16)
    high = tl.load(place + 1, mask, 0).to(tl.uint16)
    return (low | (high << 8)).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _six_bit_scales(base, s, mask):
    """Return the scale and the minimum of group `s` of a block of Q4_K or Q5_K."""
    first = tl.load(base + 4 + (s & 3), mask, 0)
    second = tl.load(base + 8 + (s & 3), mask, 0)
    rest = tl.load(base + 12 + (s & 3), mask, 0)
    scale = tl.where(s < 4, first & 63, (rest & 15) | ((first >> 2) & 48))
    least = tl.where(s < 4, second & 63, (rest >> 4) | ((second >> 2) & 48))
    return _half(base, mask) * scale.to(tl.float32), _half(base + 2, mask) * least.to(tl.float32)


@triton.jit
def _codes(base, run, bits, e, mask, RUN: tl.constexpr):
    """Return the codes of elements `e` that lie in runs of RUN bytes: of a run first the lowest `bits` bits of all its bytes."""
    per_run = RUN * 8 // bits
    byte = (e // per_run) * RUN + e % RUN
    shift = (e % per_run) // RUN * bits
    return (tl.load(base + run + byte, mask, 0).to(tl.int32) >> shift) & ((1 << bits) - 1)


@triton.jit
def _values(
    w, table, rows, g, lane, mask, FORM: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, BYTES: tl.constexpr
):
    """Return the values (outputs, groups, GROUP) of groups `g` of the rows that begin at byte `rows`."""
    s = g % GROUPS
    base = w + rows + (g // GROUPS) * BYTES
    wide = mask & (lane >= 0)
    e = s * GROUP + lane
    if FORM == "Q4_0":
        return _half(base, mask) * (_codes(base, 2, 4, e, wide, 16) - 8).to(tl.float32)
    elif FORM == "Q4_1":
        return _half(base, mask) * _codes(base, 4, 4, e, wide, 16).to(tl.float32) + _half(base + 2, mask)
    elif FORM == "Q5_0":
        code = _codes(base, 6, 4, e, wide, 16) | (_codes(base, 2, 1, e, wide, 1) << 4)
        return _half(base, mask) * (code - 16).to(tl.float32)
    elif FORM == "Q5_1":
        code = _codes(base, 8, 4, e, wide, 16) | (_codes(base, 4, 1, e, wide, 1) << 4)
        return _half(base, mask) * code.to(tl.float32) + _half(base + 2, mask)
    elif FORM == "Q8_0":
        return _half(base, mask) * tl.load(base + 2 + lane, wide, 0).to(tl.int8, bitcast=True).to(tl.float32)
    elif FORM == "Q2_K":
        both = tl.load(base + s, mask, 0)
        scale = _half(base + 80, mask) * (both & 15).to(tl.float32)
        least = _half(base + 82, mask) * (both >> 4).to(tl.float32)
        return scale * _codes(base, 16, 2, e, wide, 32).to(tl.float32) - least
    elif FORM == "Q3_K":
        scale = _codes(base, 96, 4, s, mask, 8) | (_codes(base, 104, 2, s, mask, 4) << 4)
        code = _codes(base, 32, 2, e, wide, 32) - ((_codes(base, 0, 1, e, wide, 32) ^ 1) << 2)
        return (_half(base + 108, mask) * (scale - 32).to(tl.float32)) * code.to(tl.float32)
    elif FORM == "Q4_K":
        scale, least = _six_bit_scales(base, s, mask)
        return scale * _codes(base, 16, 4, e, wide, 32).to(tl.float32) - least
    elif FORM == "Q5_K":
        scale, least = _six_bit_scales(base, s, mask)
        code = _codes(base, 48, 4, e, wide, 32) | (_codes(base, 16, 1, e, wide, 32) << 4)
        return scale * code.to(tl.float32) - least
    elif FORM == "Q6_K":
        scale = tl.load(base + 192 + s, mask, 0).to(tl.int8, bitcast=True).to(tl.float32)
        code = _codes(base, 0, 4, e, wide, 64) | (_codes(base, 128, 2, e, wide, 32) << 4)
        return (_half(base + 208, mask) * scale) * (code - 32).to(tl.float32)
    elif FORM == "IQ4_NL":
        return _half(base, mask) * tl.load(table + _codes(base, 2, 4, e, wide, 16))
    elif FORM == "IQ4_XS":
        scale = _codes(base, 4, 4, s, mask, 1) | (_codes(base, 2, 2, s, mask, 1) << 4)
        return (_half(base, mask) * (scale - 32).to(tl.float32)) * tl.load(table + _codes(base, 8, 4, e, wide, 16))
    else:
        tl.static_assert(FORM == "MXFP4")
        exponent = tl.load(base, mask, 0).to(tl.int32)
        tiny = 0x00200000 << tl.minimum(exponent, 1)  # below 2 the number is subnormal
        scale = tl.where(exponent < 2, tiny, (exponent - 1) << 23).to(tl.float32, bitcast=True)
        return scale * tl.load(table + _codes(base, 1, 4, e, wide, 16))


@triton.jit
def _product_kernel(
    x, w, table, y, rows, outputs, inputs, row_bytes,
    FORM: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, BYTES: tl.constexpr,
    OUTPUTS: tl.constexpr, TAKEN: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute a tile of y (rows, outputs) = x (rows, inputs) times the packed matrix (outputs, inputs) transposed."""
    o = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, GROUP)[None, None, :]
    starts = (o.to(tl.int64) * row_bytes)[:, None, None]
    sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for first in range(0, inputs, TAKEN * GROUP):
        g = (first // GROUP + tl.arange(0, TAKEN))[None, :, None]
        mask = (o[:, None, None] < outputs) & (g * GROUP < inputs)
        values = _values(w, table, starts, g, lane, mask, FORM, GROUP, GROUPS, BYTES)
        k = first + tl.arange(0, TAKEN * GROUP)
        part = tl.load(x + r[None, :] * inputs + k[:, None], (k[:, None] < inputs) & (r[None, :] < rows), 0.0)
        tile = tl.reshape(values, (OUTPUTS, TAKEN * GROUP)).to(part.dtype)
        sums = tl.dot(tile, part, sums, input_precision="ieee")
    place = y + r[None, :] * outputs + o[:, None]
    tl.store(place, sums.to(y.dtype.element_ty), (o[:, None] < outputs) & (r[None, :] < rows))


@triton.jit
def _values_kernel(
    w, table, numbers, y, inputs, row_bytes,
    FORM: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, BYTES: tl.constexpr,
    TAKEN: tl.constexpr, HAS_NUMBERS: tl.constexpr,
):  # fmt: skip
    """Write some values of one row: row `numbers[n]` of the matrix, or its row n."""
    n = tl.program_id(0).to(tl.int64)
    row = tl.load(numbers + n) if HAS_NUMBERS else n
    g = (tl.program_id(1) * TAKEN + tl.arange(0, TAKEN))[None, :, None]
    lane = tl.arange(0, GROUP)[None, None, :]
    mask = g * GROUP < inputs
    values = _values(w, table, row * row_bytes, g, lane, mask, FORM, GROUP, GROUPS, BYTES)
    tl.store(y + n * inputs + g * GROUP + lane, values.to(y.dtype.element_ty), mask & (lane >= 0))


def _constants(form: Format) -> dict[str, Any]:
    group = 16 if form.name in GROUPS_OF_16 else 32
    return {"FORM": form.name, "GROUP": group, "GROUPS": form.block // group, "BYTES": form.block_bytes}


def _table(packed_B: Tensor, form: Format) -> Tensor:
    """Return the table of the format's codes; without one, any tensor."""
    return table_on(form.name, packed_B.device) if form.name in TABLES else packed_B


def _current(memory: Tensor) -> AbstractContextManager[Any]:
    """Make the memory's card the current one, on which Triton launches."""
    return torch.cuda.device(memory.device) if memory.is_cuda else nullcontext()


def multiply(packed_B: Tensor, form: Format, x_RI: Tensor, outputs: int, tile: Tile) -> Tensor:
    """Return y (R, O) in the dtype of x (R, I), which is contiguous. `packed_B` holds the matrix's rows."""
    rows, inputs = x_RI.shape
    y_RO = x_RI.new_empty(rows, outputs)
    constants = _constants(form)
    grid = (triton.cdiv(outputs, tile.outputs), triton.cdiv(rows, ROWS_AT_ONCE))
    with _current(packed_B):
        _product_kernel[grid](
        x_RI, packed_B, _table(packed_B, form), y_RO, rows, outputs, inputs, form.row_bytes(inputs), **constants,
        OUTPUTS=tile.outputs, TAKEN=tile.inputs // constants["GROUP"], ROWS=ROWS_AT_ONCE, num_warps=tile.warps,
    )  # fmt: skip
    return y_RO


def values(packed_B: Tensor, form: Format, inputs: int, rows: Tensor | int, dtype: torch.dtype) -> Tensor:
    """Return values (N, I) of the first N rows, or of the rows with these numbers (N,), rounded to `dtype`."""
    count = rows if isinstance(rows, int) else rows.numel()
    y_NI = torch.empty(count, inputs, dtype=dtype, device=packed_B.device)
    constants = _constants(form)
    groups = VALUES_TILE // constants["GROUP"]
    with _current(packed_B):
        _values_kernel[(count, triton.cdiv(inputs, VALUES_TILE))](
        packed_B, _table(packed_B, form), packed_B if isinstance(rows, int) else rows, y_NI, inputs,
        form.row_bytes(inputs), **constants, TAKEN=groups, HAS_NUMBERS=not isinstance(rows, int),
        enable_fp_fusion=False,  # to the bit what torch computes
    )  # fmt: skip
    return y_NI
