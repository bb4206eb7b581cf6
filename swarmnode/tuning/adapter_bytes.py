"""Recipe and states of an adapter as bytes of messages."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import safetensors
import safetensors.torch
from torch import Tensor

from swarmnode.codec.body import DECODE_ERRORS
from swarmnode.codec.tuning_messages import PIECE_BYTES, AdapterPiece
from swarmnode.compute.training.adapters.recipe import AdapterRecipe
from swarmnode.errors import CheckpointError, ProtocolError, UsageError

SLACK_BYTES = 1 << 20  # for the headers of a state's files


def encode_recipe(recipe: AdapterRecipe) -> bytes:
    """Return the msgpack bytes of a recipe."""
    return msgspec.msgpack.encode(recipe)


def decode_recipe(raw: bytes) -> AdapterRecipe:
    """Return the recipe in a message. Raises ProtocolError if it is not valid."""
    try:
        return msgspec.msgpack.decode(raw, type=AdapterRecipe)
    except (*DECODE_ERRORS, UsageError) as error:
        raise ProtocolError(f"bad recipe: {error}") from None


def pieces_of(
    step: int, unit: int, raw: bytes, *, ends: bool, gradients: bool = False
) -> Iterator[tuple[AdapterPiece, bytes]]:
    """Yield the messages for the file of one layer at `step`, each with its payload. `ends`: it is the last layer.

    `gradients`: the file holds sums of gradients for a hop, in place of a state.
    """
    for offset in range(0, max(1, len(raw)), PIECE_BYTES):
        piece = raw[offset : offset + PIECE_BYTES]
        is_last = ends and offset + len(piece) == len(raw)
        yield AdapterPiece(step, unit, offset, len(raw), is_last, gradients), piece


def decode_state(raw: bytes) -> dict[str, Tensor]:
    """Return the tensors in a layer's file, by name. Raises CheckpointError if the bytes are no safetensors file."""
    try:
        return safetensors.torch.load(raw)
    except (safetensors.SafetensorError, KeyError, ValueError, TypeError, RuntimeError) as error:  # also of odd dtypes
        raise CheckpointError(f"the bytes are no state of an adapter: {str(error)[:200]}") from None
