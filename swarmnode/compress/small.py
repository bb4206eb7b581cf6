"""int8 of small tensors on the CPU, as `int8.py` makes it, bit for bit: starting the operators of torch costs more than their work.

A decode step sends one row. numpy starts an operation in a third of the time that torch takes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swarmnode.codec.tensors import INT8_GROUP
from swarmnode.compress.blocks import SMALLEST_SCALE
from swarmnode.compress.int8 import LEVELS

MOST_ELEMENTS = 1 << 14  # from here on torch is as fast
_STEP = np.float32(1 / LEVELS)
_SMALLEST = np.float32(SMALLEST_SCALE)
_SPLIT = np.float32((1 << 16) + 1)  # Veltkamp's: it leaves the 8 bits of significand that bfloat16 has
_LARGEST = np.float32(2.0**110)  # of an element: what is split must not overflow
# A dtype that is named anew each time costs as much as an operation.
_HALVES, _FLOATS, _BITS, _CODES = np.dtype("<u2"), np.dtype("<f4"), np.dtype("<i4"), np.dtype(np.int8)
_INFINITE = 0x7F80  # as bfloat16; NaN and what is negative lie above
_STARTS = np.arange(0, MOST_ELEMENTS, INT8_GROUP)  # of the groups


def is_few(count: int) -> bool:
    """Whether so many elements are worked on here."""
    return 0 < count <= MOST_ELEMENTS and count % INT8_GROUP == 0


def is_small(x: Tensor) -> bool:
    """Whether it can be encoded here."""
    return is_few(x.numel()) and x.dtype == torch.float32 and x.is_cpu


def encode_small_int8(x: Tensor) -> bytes | None:
    """The payload of a tensor that is small; None where it holds huge values, or such as are not finite."""
    x_GW: NDArray[Any] = (x.detach() if x.requires_grad else x).numpy().reshape(-1, INT8_GROUP)
    sizes_GW: NDArray[Any] = np.abs(x_GW)
    # As bits: what has no sign is ordered alike, NaN at the top, and whole numbers are compared three times as fast.
    peaks_G = np.maximum.reduceat(sizes_GW.view(_BITS).ravel(), _STARTS[: len(x_GW)]).view(_FLOATS)
    if not np.maximum.reduce(peaks_G) < _LARGEST:
        return None
    scales_G = np.maximum(peaks_G * _STEP, _SMALLEST)
    split_G = scales_G * _SPLIT
    scales_G = split_G - (split_G - scales_G)  # to bfloat16: to the nearest, ties to even
    codes_GW = np.multiply(x_GW, np.reciprocal(scales_G)[:, None], sizes_GW)
    np.rint(codes_GW, codes_GW)
    return scales_G.view(_HALVES)[1::2].tobytes() + codes_GW.astype(_CODES).tobytes()


def decode_small_int8(payload: bytes | bytearray | memoryview, shape: tuple[int, ...], count: int) -> Tensor | None:
    """The tensor of this shape and so many elements in float32; None where a scale is not finite."""
    groups = count // INT8_GROUP
    halves_G = np.frombuffer(payload, _HALVES, groups)
    if np.maximum.reduce(halves_G) >= _INFINITE:
        return None
    wide_G: NDArray[Any] = np.zeros(2 * groups, _HALVES)
    wide_G[1::2] = halves_G
    scales_G = wide_G.view(_FLOATS)
    codes_GW = np.frombuffer(payload, _CODES, count, 2 * groups).reshape(groups, INT8_GROUP)
    return torch.from_numpy((codes_GW * scales_G[:, None]).reshape(shape))
