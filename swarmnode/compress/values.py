"""Values that cross a boundary, as one payload: the tensors' own payloads one after another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from swarmnode.codec.tensors import FLOAT_DTYPES, Codec, TensorInfo, payload_bytes
from swarmnode.compress.codecs import DTYPE_OF, Buffer, decode, encode
from swarmnode.errors import ProtocolError

Encoded = tuple[tuple[TensorInfo, ...], list[Buffer]]


def describe_values(values: Sequence[Tensor]) -> tuple[TensorInfo, ...]:
    """Descriptors of the values as they are. Raises KeyError for a dtype that does not travel."""
    return tuple(TensorInfo(Codec.NONE, DTYPE_OF[value.dtype], tuple(value.shape)) for value in values)


def encode_values(values: Sequence[Tensor], codec: Codec = Codec.NONE, keep: float = 1.0) -> Encoded:
    """Descriptors and payloads. Only floats are compressed: whole numbers are token ids or labels. `keep`: of top-k."""
    encoded = [
        encode(value, codec, param=round(keep * value.numel()) if codec == Codec.TOPK else 0)
        if value.is_floating_point()
        else encode(value, Codec.NONE)
        for value in values
    ]
    return tuple(info for info, _ in encoded), [payload for _, payload in encoded]


def payload_of(buffers: Sequence[Buffer]) -> bytes:
    """The payloads one after another, as they arrive."""
    return b"".join(buffers)


def decode_values(infos: Sequence[TensorInfo], payload: Buffer, device: torch.device | str) -> tuple[Tensor, ...]:
    """The tensors: floats on `device`, whole numbers on the host. Raises ProtocolError where the payload is not what they
    imply."""
    view = memoryview(payload)
    values: list[Tensor] = []
    for info in infos:
        size = payload_bytes(info)
        values.append(decode(info, view[:size], device=device if info.dtype in FLOAT_DTYPES else "cpu"))
        view = view[size:]
    if len(view):
        raise ProtocolError(f"a payload has {len(view)} bytes more than its descriptors imply")
    return tuple(values)
