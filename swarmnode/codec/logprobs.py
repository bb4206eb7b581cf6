"""Logarithms of probabilities beside a drawn token: the drawn one's first, then the most likely ones', eight bytes each."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from typing import NamedTuple

from swarmnode.errors import ProtocolError

_RECORD = struct.Struct("<if")
LOGPROB_BYTES = _RECORD.size


class TokenLogprob(NamedTuple):
    """A token's natural logarithm of its probability, as the model has it: before bias, penalties and temperature."""

    id: int
    logprob: float


def pack_logprobs(logprobs: Iterable[TokenLogprob]) -> bytes:
    """As they travel: int32 and float32, little-endian."""
    return b"".join(_RECORD.pack(*one) for one in logprobs)


def unpack_logprobs(payload: bytes | bytearray | memoryview) -> tuple[TokenLogprob, ...]:
    """Raises ProtocolError where these are none."""
    if len(payload) % LOGPROB_BYTES:
        raise ProtocolError(f"{len(payload)} bytes are no logarithms of probabilities")
    told = tuple(TokenLogprob(*record) for record in _RECORD.iter_unpack(payload))
    if not all(one.id >= 0 and math.isfinite(one.logprob) and one.logprob <= 0 for one in told):
        raise ProtocolError("logarithms of probabilities are finite and not over 0")
    return told
