"""State of an adapter as bytes of messages: a safetensors file for each layer."""

from __future__ import annotations

import safetensors
import safetensors.torch
from torch import Tensor

from swarmnode.errors import CheckpointError

SLACK_BYTES = 1 << 20  # for the header of a file


def decode_state(raw: bytes) -> dict[str, Tensor]:
    """Return the tensors in a layer's file, by name. Raises CheckpointError if the bytes are no such file."""
    try:
        return safetensors.torch.load(raw)
    except (safetensors.SafetensorError, KeyError, ValueError, TypeError, RuntimeError) as error:  # also of odd dtypes
        raise CheckpointError(f"the bytes are no state of an adapter: {str(error)[:200]}") from None
