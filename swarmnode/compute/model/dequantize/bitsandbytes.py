"""bitsandbytes: NF4 and FP4 as an index of four bits into a table, times a scale for each block; int8 with a scale for each row.

Computed with checked indices, not by bitsandbytes' own kernels: these believe the sizes that a checkpoint states.
"""

from __future__ import annotations

import contextlib
import json
import math
from typing import Any

import torch
from torch import Tensor

from swarmnode.compute.model.dequantize.packed_matrix import PackedMatrix

STATES = (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")
INT8_LARGEST = 127


def dequantize_int8(matrix: PackedMatrix) -> Tensor:
    """float32 weight_OI of int8 numbers and the largest absolute value SCB_O of each row."""
    largest_O = matrix[".SCB"].float()
    matrix.require(matrix.packed.ndim == 2 and largest_O.shape == matrix.packed.shape[:1], "its scales do not fit it")
    return matrix.packed.float() * largest_O[:, None] / INT8_LARGEST


def dequantize_4bit(matrix: PackedMatrix) -> Tensor:
    """float32 weight of two indices in each byte, the first in its upper half; scales may be quantised themselves."""
    state = _state(matrix)
    shape, block = [int(size) for size in state["shape"]], int(state["blocksize"])
    bytes_N = matrix.packed.flatten().long()
    count = math.prod(shape)
    matrix.require(count > 0 and block > 0 and -(-count // 2) == len(bytes_N), f"it does not hold a matrix {shape}")
    indices = torch.stack([bytes_N >> 4, bytes_N & 0xF], 1).flatten()[:count]
    scales = matrix[".absmax"]
    if ".nested_absmax" in matrix.beside:
        scales = _by_blocks(
            matrix, ".nested_quant_map", scales.long(), matrix[".nested_absmax"], int(state["nested_blocksize"])
        )
        scales = scales + float(state["nested_offset"])
    return _by_blocks(matrix, ".quant_map", indices, scales, block).reshape(shape)


def _by_blocks(matrix: PackedMatrix, table: str, indices: Tensor, scales: Tensor, block: int) -> Tensor:
    values = matrix[table].float()
    matrix.require(block > 0 and scales.is_floating_point(), "its scales are no numbers")
    matrix.require(values.ndim == 1 and int(indices.max()) < len(values), f"its {table[1:]} is too short")
    matrix.require(scales.shape == (-(-len(indices) // block),), f"its scales are not one for {block} numbers each")
    return values[indices] * scales.float().repeat_interleave(block)[: len(indices)]


def _state(matrix: PackedMatrix) -> dict[str, Any]:
    """What is written as JSON into the bytes of a tensor."""
    raw = matrix[next((each for each in STATES if each in matrix.beside), STATES[0])]
    state = None
    with contextlib.suppress(ValueError, TypeError):
        state = json.loads(bytes(raw.tolist()))
    wanted = {"shape", "blocksize"} | (
        {"nested_blocksize", "nested_offset"} if ".nested_absmax" in matrix.beside else set()
    )
    matrix.require(isinstance(state, dict) and wanted <= state.keys(), "its quant_state is damaged")
    assert isinstance(state, dict)
    return state
