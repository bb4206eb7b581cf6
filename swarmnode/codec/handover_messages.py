"""Bodies of `/swarmnode/handover/1`: the cache of a session goes from a hop that leaves to the hop that takes its place.

GET_CACHE, CACHE    the question and its answer; ERROR NO_SESSION if the peer does not leave, or has no such cache
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from swarmnode.codec.body import MAX_ADAPTER_CHARS, MAX_POSITIONS, Body, HopIndex, Position, SessionId, Unit
from swarmnode.codec.frames import MAX_SEQ, FrameKind
from swarmnode.codec.tensors import TensorInfo

HANDOVER_PROTOCOL = "/swarmnode/handover/1"
MAX_CACHE_PARTS = 2048  # with 30 bytes each they fit one body
MAX_CACHE_KIND_CHARS = 16
MAX_CACHE_INDEX = 255
MAX_LEAVING = 4  # hops that an OPEN names; of more that leave together the last ones


class GetCache(Body, frozen=True):
    """Question to a hop that leaves: the cache of a session's layers [start, end) at a position up to `most`.

    `truncations` is the number of the session's last truncation that the asker knows, and `adapter` as in OPEN.
    """

    session: SessionId
    start: Unit
    end: Unit
    most: Annotated[int, Meta(ge=1, le=MAX_POSITIONS)]
    truncations: Annotated[int, Meta(ge=0, le=MAX_SEQ)] = 0
    adapter: Annotated[str, Meta(max_length=MAX_ADAPTER_CHARS)] = ""


class CachePart(msgspec.Struct, array_like=True, frozen=True):
    """Tensor of a cache, its layer's number in the model, and its place there: `kind` is "kv", "conv" or "recurrent"."""

    layer: Unit
    kind: Annotated[str, Meta(max_length=MAX_CACHE_KIND_CHARS)]
    index: Annotated[int, Meta(ge=0, le=MAX_CACHE_INDEX)]
    tensor: TensorInfo


class CacheReply(Body, frozen=True):
    """Answer to GET_CACHE: the cache after the first `length` positions. The payload is that of the parts, one after another."""

    length: Annotated[int, Meta(ge=1, le=MAX_POSITIONS)]
    parts: Annotated[tuple[CachePart, ...], Meta(max_length=MAX_CACHE_PARTS)]


class TookOver(Body, frozen=True):
    """Note to the client, passed on by each hop before: hop `index` has the first `length` positions from a hop that leaves, and
    has not computed them."""

    index: HopIndex
    length: Position


HANDOVER_BODIES: dict[FrameKind, type[Body]] = {
    FrameKind.GET_CACHE: GetCache,
    FrameKind.CACHE: CacheReply,
    FrameKind.TOOK_OVER: TookOver,
}
