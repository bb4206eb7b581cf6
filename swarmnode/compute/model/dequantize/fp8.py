"""FP8: numbers of eight bits, with a scale for a block of them, a row, or the whole matrix."""

from __future__ import annotations

from torch import Tensor

from swarmnode.compute.model.dequantize.packed_matrix import PackedMatrix

SCALES = ("_scale_inv", "_scale")  # by either name it is what the numbers are multiplied with


def dequantize_fp8(matrix: PackedMatrix) -> Tensor:
    """float32 weight_…OI of float8 numbers. A scale of fewer than two dimensions is the whole matrix's, or one for each row."""
    name = SCALES[1] if SCALES[1] in matrix.beside else SCALES[0]
    scale, weight = matrix[name], matrix.packed.float()
    matrix.require(scale.is_floating_point() and weight.ndim >= 2, f"its {name[1:]} is {scale.dtype}")
    scale = scale.float()
    if scale.ndim == 1 and scale.numel() > 1:
        scale = scale[:, None]
    while scale.ndim < weight.ndim:
        scale = scale[None]
    block = matrix.settings.get("weight_block_size")
    for dimension in range(weight.ndim):
        size, count = weight.shape[dimension], scale.shape[dimension]
        length = _block_length(block, dimension - weight.ndim, size, count)
        matrix.require(-(-size // length) == count, "its scales do not fit the matrix")
        scale = scale.repeat_interleave(length, dimension).narrow(dimension, 0, size)
    return weight * scale


def _block_length(block: object, dimension: int, size: int, count: int) -> int:
    """How many numbers of this dimension (-1 is the last) share a scale; the last block may be shorter."""
    if count in (1, size) or dimension < -2:
        return max(1, -(-size // max(count, 1)))
    if isinstance(block, list) and len(block) == 2 and all(isinstance(each, int) and each > 0 for each in block):
        return int(block[dimension])
    return -(-size // count)
