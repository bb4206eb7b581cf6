"""Values that cross a boundary, as one payload: the tensors' own payloads one after another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from swarmnode.codec.tensors import Codec, TensorInfo, payload_bytes
from swarmnode.compress.codecs import decode, encode
from swarmnode.errors import ProtocolError
from swarmnode.net.interfaces import Buffer

Encoded = tuple[tuple[TensorInfo, ...], list[Buffer]]


def encode_values(values: Sequence[Tensor], codec: Codec = Codec.NONE) -> Encoded:
    """Descriptors and payloads. Only floats are compressed: whole numbers are token ids or labels."""
    encoded = [encode(value, codec if value.is_floating_point() else Codec.NONE) for value in values]
    return tuple(info for info, _ in encoded), [payload for _, payload in encoded]


def decode_values(
    infos: Sequence[TensorInfo], payload: bytes | bytearray, device: torch.device | str
) -> tuple[Tensor, ...]:
    """The tensors, on `device`. Raises ProtocolError where the payload is not what the descriptors imply."""
    view = memoryview(payload)
    values: list[Tensor] = []
    for info in infos:
        size = payload_bytes(info)
        values.append(decode(info, view[:size], device=device))
        view = view[size:]
    if len(view):
        raise ProtocolError(f"a payload has {len(view)} bytes more than its descriptors imply")
    return tuple(values)
