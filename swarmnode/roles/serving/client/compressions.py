"""As what a user may ask that states go from peer to peer."""

from __future__ import annotations

from collections.abc import Collection

from swarmnode.codec.tensors import Codec
from swarmnode.errors import UsageError

AUTO = "auto"
COMPRESSIONS = (AUTO, "none", "bf16", "fp16", "int8", "int4")


def codec_named(compression: str) -> Codec:
    """The codec of one of COMPRESSIONS; where hops choose, the one that they begin with."""
    return Codec.NONE if compression == AUTO else Codec[compression.upper()]


def check_compression(compression: str, allowed: Collection[int]) -> None:
    """Raises UsageError where a swarm does not allow it, or nobody knows it."""
    known = [name for name in COMPRESSIONS if name == AUTO or codec_named(name) in allowed]
    if compression not in known:
        raise UsageError(f"this swarm does not compress as {compression}: choose {', '.join(known)}")
