"""Forms of the keys and values in a cohort: plain, or in 8 bits with a scale for each head and position.

Every buffer is (rows, heads, columns, X), so cohorts move, cut, reorder and copy all forms in the same way, and copied positions
have the same bytes.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from swarmnode.config import INT8_KV, PLAIN

Buffers = tuple[Tensor, ...]
"""Buffers of one layer, each (rows, heads, columns, X)"""

LEVELS = 127  # of int8 on each side of zero: with a scale in bfloat16, which is off by 2^-8 at most, no quotient rounds to 128
SMALLEST = 1e-30  # scale: of a vector of zeros, too


class KvStore(Protocol):
    """Form of the keys and values in a cohort's buffers. `keys` and `values` are (rows, heads, T, dim), in any float dtype."""

    def allocate(self, keys: Tensor, values: Tensor, rows: int, columns: int) -> Buffers:
        """Return uninitialised buffers of `rows` rows and `columns` columns for keys and values like these."""

    def write(self, buffers: Buffers, keys: Tensor, values: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Write T columns from column `start` on, and return the keys and values of all columns up to them."""

    def write_at(self, buffers: Buffers, keys: Tensor, values: Tensor, places_T: Tensor) -> tuple[Tensor, Tensor]:
        """Write T columns at `places_T` (int64), and return the keys and values of all columns of the buffers."""


class PlainStore(KvStore):
    """Keys and values as they come: attention reads the buffers themselves."""

    def allocate(self, keys: Tensor, values: Tensor, rows: int, columns: int) -> Buffers:
        """Return a buffer for the keys and one for the values, in their dtypes."""
        return tuple(like.new_empty(rows, like.shape[1], columns, like.shape[3]) for like in (keys, values))

    def write(self, buffers: Buffers, keys: Tensor, values: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Write T columns from column `start` on, and return views of all columns up to them."""
        kept_keys, kept_values = buffers
        count = keys.shape[2]
        kept_keys.narrow(2, start, count).copy_(keys)
        kept_values.narrow(2, start, count).copy_(values)
        return kept_keys.narrow(2, 0, start + count), kept_values.narrow(2, 0, start + count)

    def write_at(self, buffers: Buffers, keys: Tensor, values: Tensor, places_T: Tensor) -> tuple[Tensor, Tensor]:
        """Write T columns at `places_T`, and return the buffers."""
        kept_keys, kept_values = buffers
        kept_keys.index_copy_(2, places_T, keys)
        kept_values.index_copy_(2, places_T, values)
        return kept_keys, kept_values


class Int8Store(KvStore):
    """Keys and values in 8 bits: per head and position `dim` values of int8 and the scale of their largest in bfloat16.

    Attention gets a copy of one layer at a time, in the dtype of the new keys. The newest positions are read back, too, so that a
    position of a prompt sees what a decoded one sees.
    """

    def allocate(self, keys: Tensor, values: Tensor, rows: int, columns: int) -> Buffers:
        """Return buffers for the keys, their scales, the values and their scales."""
        shapes = [(rows, like.shape[1], columns, like.shape[3]) for like in (keys, values)]
        return tuple(
            keys.new_empty((*shape[:3], width), dtype=dtype)
            for shape in shapes
            for width, dtype in ((shape[3], torch.int8), (1, torch.bfloat16))
        )

    def write(self, buffers: Buffers, keys: Tensor, values: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Quantise T columns into the columns from `start` on, and return copies of all columns up to them."""
        count = keys.shape[2]
        for buffer, new in zip(buffers, _quantised(keys, values), strict=True):
            buffer.narrow(2, start, count).copy_(new)
        return _restored([buffer.narrow(2, 0, start + count) for buffer in buffers], keys, values)

    def write_at(self, buffers: Buffers, keys: Tensor, values: Tensor, places_T: Tensor) -> tuple[Tensor, Tensor]:
        """Quantise T columns into those at `places_T`, and return copies of all columns of the buffers."""
        for buffer, new in zip(buffers, _quantised(keys, values), strict=True):
            buffer.index_copy_(2, places_T, new)
        return _restored(buffers, keys, values)


STORES: dict[str, KvStore] = {PLAIN: PlainStore(), INT8_KV: Int8Store()}
"""Forms by the name of `StageConfig.kv`"""


def quantise(states: Tensor) -> tuple[Tensor, Tensor]:
    """Return (..., dim) states as int8 and their scales (..., 1) in bfloat16: each vector's largest value becomes 127 or -127.

    Vectors with a NaN or an infinity get a scale that is none, so that reading them gives no finite number.
    """
    states = states.float()
    scales = (states.abs().amax(-1, keepdim=True) * (1 / LEVELS)).clamp_(min=SMALLEST).to(torch.bfloat16)
    return (states / scales.float()).round_().to(torch.int8), scales


def _quantised(keys: Tensor, values: Tensor) -> Buffers:
    """Return int8 and scales of the keys and of the values, in the order of the buffers."""
    if keys.shape != values.shape:
        return *quantise(keys), *quantise(values)
    levels, scales = quantise(torch.cat([keys, values], 1))  # a third less time for a single position
    heads = keys.shape[1]
    return levels[:, :heads], scales[:, :heads], levels[:, heads:], scales[:, heads:]


def _restored(buffers: Buffers | list[Tensor], keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values of quantised columns in the dtypes of `keys` and `values`."""
    key_levels, key_scales, value_levels, value_scales = buffers
    return (
        key_levels.to(keys.dtype).mul_(key_scales.to(keys.dtype)),
        value_levels.to(values.dtype).mul_(value_scales.to(values.dtype)),
    )
