"""Sketches of the tensors that cross a boundary, row by row: what an auditor compares of a session's states, of any shape here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from swarmnode.codec.audit_messages import MAX_SKETCHED, SKETCH_BYTES
from swarmnode.codec.tensors import FLOAT_DTYPES, Codec, TensorInfo, element_count
from swarmnode.compress.codecs import decode, encode
from swarmnode.compress.topk import keep_largest
from swarmnode.compute.serving.sketch import read_sketches, sketch, sketch_bytes
from swarmnode.errors import ProtocolError
from swarmnode.net.interfaces import Buffer


def sketched(values: Iterable[Tensor], seed: bytes) -> list[Tensor]:
    """sketch_TK of each float tensor. A row is what the last dimension holds; of many rows MAX_SKETCHED are taken, at equal
    distances, from one on that follows from the seed."""
    return [sketch(_rows(value, seed), seed) for value in values if value.is_floating_point() and value.numel()]


def sketches_payload(values: Iterable[Tensor], seed: bytes) -> bytes:
    """As they travel."""
    return b"".join(map(sketch_bytes, sketched(values, seed)))


def payload_bytes_of(infos: Iterable[TensorInfo]) -> int:
    """How long the sketches of tensors like these are."""
    return sum(SKETCH_BYTES * count for count in _counts(infos))


def read_payload(data: Buffer, infos: Iterable[TensorInfo]) -> list[Tensor]:
    """sketch_TK of each float tensor. Raises ProtocolError where these are not such sketches."""
    found, view = [], memoryview(data)
    for count in _counts(infos):
        found.append(read_sketches(view[: SKETCH_BYTES * count], count))
        view = view[SKETCH_BYTES * count :]
    if len(view):
        raise ProtocolError(f"{len(view)} bytes after the last sketch")
    return found


def as_sent(values: Sequence[Tensor], infos: Sequence[TensorInfo]) -> list[Tensor]:
    """Our values as another stage's would have arrived. Raises ProtocolError where they are not alike in number and shape."""
    if [tuple(value.shape) for value in values] != [info.shape for info in infos]:
        raise ProtocolError("what was sent has other shapes than what is computed from it")
    pairs = zip(values, infos, strict=True)
    return [_as_decoded(value, info) for value, info in pairs if value.is_floating_point()]


def _as_decoded(value: Tensor, info: TensorInfo) -> Tensor:
    if info.codec == Codec.TOPK:  # whose encoder goes by a sample, and would take a few more or less the second time
        return keep_largest(value.reshape(-1), info.param).view(value.shape)
    return decode(*encode(value, Codec(info.codec)))


def _counts(infos: Iterable[TensorInfo]) -> Iterator[int]:
    for info in infos:
        elements = element_count(info.shape)
        if info.dtype in FLOAT_DTYPES and elements:
            yield min(MAX_SKETCHED, elements // (info.shape[-1] if info.shape else 1))


def _rows(value: Tensor, seed: bytes) -> Tensor:
    rows_TH = value.reshape(-1, value.shape[-1]) if value.dim() else value.reshape(1, 1)
    if len(rows_TH) <= MAX_SKETCHED:
        return rows_TH
    first = int.from_bytes(seed, "little")
    places = [(first + number * len(rows_TH) // MAX_SKETCHED) % len(rows_TH) for number in range(MAX_SKETCHED)]
    return rows_TH[torch.tensor(places, device=value.device)]
