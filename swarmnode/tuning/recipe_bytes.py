"""Recipe of an adapter as bytes of a message."""

from __future__ import annotations

import msgspec

from swarmnode.codec.body import DECODE_ERRORS
from swarmnode.compute.training.adapters.recipe import AdapterRecipe
from swarmnode.errors import ProtocolError, UsageError


def encode_recipe(recipe: AdapterRecipe) -> bytes:
    """Return the msgpack bytes of a recipe."""
    return msgspec.msgpack.encode(recipe)


def decode_recipe(raw: bytes) -> AdapterRecipe:
    """Return the recipe in a message. Raises ProtocolError if it is not valid."""
    try:
        return msgspec.msgpack.decode(raw, type=AdapterRecipe)
    except (*DECODE_ERRORS, UsageError) as error:
        raise ProtocolError(f"bad recipe: {error}") from None
