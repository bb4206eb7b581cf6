"""Sketches: rows of tensors in a few dozen numbers each, so that two replicas can be compared without sending tensors.

Random projections onto signs, as in Activation-DiFR (arXiv 2511.20621): the distance of two sketches is an unbiased measure of
the distance of the sketched rows. The signs follow from a seed that is chosen after the states were sent, so that no peer can
change states and keep their sketch.

Digests take the place of sketches between peers of one class of equal bits: there any difference counts. Either kind is a tensor
with a row for each position, and `deviations` compares two of one kind.

Shape letters: T rows (of hidden states: positions), H of a row, K of a sketch or digest, N float32 numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from swarmnode.codec.audit_messages import MAX_SKETCHED, POSITION_DIGEST_BYTES, SKETCH_BYTES, SKETCH_VALUES
from swarmnode.codec.tensors import FLOAT_DTYPES, DType, TensorInfo, element_count
from swarmnode.errors import ProtocolError

REMEMBERED_SEEDS = 8
MOST_DIGITS = 4  # of a token's id, each a byte


@lru_cache(maxsize=REMEMBERED_SEEDS)
def signs(seed: bytes, count: int) -> Tensor:
    """Draw `count` signs (a multiple of 8) of -1 and 1 (int8): the bits of SHAKE-128 of the seed, the highest of a byte first."""
    bits = np.unpackbits(np.frombuffer(hashlib.shake_128(seed).digest(count // 8), dtype=np.uint8))
    return torch.from_numpy(bits.astype(np.int8) * 2 - 1)


def sketch(hidden_TH: Tensor, seed: bytes) -> Tensor:
    """Project rows of any float dtype to sketch_TK (float32). Sums are in float64, so that their order does not matter."""
    width = hidden_TH.shape[-1]
    signs_HK = signs(seed, width * SKETCH_VALUES).view(width, SKETCH_VALUES)
    return (hidden_TH.to("cpu", torch.float64) @ signs_HK.double()).to(torch.float32)


def digests(hidden_TH: Tensor, seed: bytes) -> Tensor:
    """Return digests_TK (uint8) of rows of any dtype: of each row's bytes, with `seed` as key, so that none can be known before."""
    rows_TB = hidden_TH.to("cpu").contiguous().view(torch.uint8).numpy()
    found = (hashlib.blake2b(row, digest_size=POSITION_DIGEST_BYTES, key=seed).digest() for row in rows_TB)
    return torch.frombuffer(bytearray(b"".join(found)), dtype=torch.uint8).view(-1, POSITION_DIGEST_BYTES)


def sketches(values: Iterable[Tensor], seed: bytes) -> list[Tensor]:
    """Project the rows of each float tensor that is not empty to a sketch_TK, and of each tensor of tokens' digits. The last
    dimension makes a row.

    From a tensor with more than MAX_SKETCHED rows it takes MAX_SKETCHED at equal distances. The seed chooses the first one.
    """
    return [sketch(_rows(value, seed), seed) for value in values if is_sketched(value)]


def is_sketched(value: Tensor | TensorInfo) -> bool:
    """Return whether a value, or a described one, is sketched: floats, and digits of tokens, which a stage passes on as bytes."""
    is_float = value.is_floating_point() if isinstance(value, Tensor) else value.dtype in FLOAT_DTYPES
    is_digits = value.dtype in (torch.uint8, DType.UINT8) and len(value.shape) == 3 and value.shape[2] <= MOST_DIGITS
    return 0 not in value.shape and (is_float or is_digits)


def rows_sketched(infos: Iterable[TensorInfo]) -> list[int]:
    """Return how many rows `sketches` takes of each value that is sketched."""
    rows = (element_count(info.shape) // (info.shape[-1] if info.shape else 1) for info in infos if is_sketched(info))
    return [min(MAX_SKETCHED, count) for count in rows]


def _rows(value: Tensor, seed: bytes) -> Tensor:
    rows_TH = value.reshape(-1, value.shape[-1]) if value.dim() else value.reshape(1, 1)
    if len(rows_TH) <= MAX_SKETCHED:
        return rows_TH
    first = int.from_bytes(seed, "little")
    places = [(first + number * len(rows_TH) // MAX_SKETCHED) % len(rows_TH) for number in range(MAX_SKETCHED)]
    return rows_TH[torch.tensor(places, device=value.device)]


def sketch_bytes(sketch_N: Tensor) -> bytes:
    """Encode a sketch of any shape as bytes: float32, little-endian."""
    return sketch_N.contiguous().numpy().astype("<f4").tobytes()


def read_sketch(data: bytes | bytearray | memoryview) -> Tensor:
    """Decode the sketch_N in `data`. Raises ProtocolError unless it is a whole number of float32 values."""
    if len(data) % 4:
        raise ProtocolError(f"a sketch has {len(data)} bytes, not whole float32 values")
    return torch.from_numpy(np.frombuffer(data, dtype="<f4").astype(np.float32))


def read_sketches(data: bytes | bytearray | memoryview, count: int) -> Tensor:
    """Decode the sketch_TK of `count` rows. Raises ProtocolError if there are more or fewer, or they are not finite."""
    if len(data) != count * SKETCH_BYTES:
        raise ProtocolError(f"sketches of {count} positions cannot have {len(data)} bytes")
    sketch_TK = read_sketch(data).view(count, SKETCH_VALUES)
    if not bool(sketch_TK.isfinite().all()):
        raise ProtocolError("a sketch has values that are not finite")
    return sketch_TK


def read_digests(data: bytes | bytearray | memoryview, count: int) -> Tensor:
    """Decode the digests_TK of `count` rows. Raises ProtocolError if there are more or fewer."""
    if len(data) != count * POSITION_DIGEST_BYTES:
        raise ProtocolError(f"digests of {count} positions cannot have {len(data)} bytes")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(count, POSITION_DIGEST_BYTES)


def deviations(one_TK: Tensor, other_TK: Tensor, *, least: float = 0.0) -> list[float]:
    """Return for each row the distance of two sketches, relative to their lengths: infinite if only one is zero. Two digests that
    differ are infinitely far apart, and equal ones not at all.

    `least` is explained at `relative`.
    """
    if one_TK.dtype == other_TK.dtype == torch.uint8:
        return torch.where((one_TK == other_TK).all(-1), 0.0, torch.inf).tolist()
    one_TK, other_TK = one_TK.double(), other_TK.double()
    lengths_T = (one_TK.norm(dim=-1) * other_TK.norm(dim=-1)).sqrt()
    return relative((one_TK - other_TK).norm(dim=-1), lengths_T, least=least).tolist()


def relative(distances_T: Tensor, lengths_T: Tensor, *, least: float) -> Tensor:
    """Divide distances by lengths; a distance of 0 stays 0.

    A row counts as at least `least` times as long as the root mean square length: some gradients are nothing but rounding.
    """
    if least:
        lengths_T = lengths_T.clamp_min(least * float(lengths_T.square().mean().sqrt()))
    return torch.where(distances_T == 0, 0.0, distances_T / lengths_T)
