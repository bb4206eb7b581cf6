"""Bodies of frames by which peers measure one another: their speed while they work, and the bandwidth between them."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from swarmnode.codec.body import MAX_ROUTE_HOPS, Body
from swarmnode.codec.frames import FrameKind

MAX_UNIT_US = (1 << 32) - 1
MAX_PROBE_BYTES = 512 * 1024

UnitMicroseconds = Annotated[int, Meta(ge=0, le=MAX_UNIT_US)]


class Ran(Body, frozen=True):
    """A decode step, which ended at position `seq`, has left the sender; goes to who sent it that step, which so learns how
    long it took.

    `later_us` are the microseconds per unit of the hops after the sender, in the order of the route, each as the hop before
    it has measured them; 0 where it has not. In a ring the first hop comes after the last.
    """

    later_us: Annotated[tuple[UnitMicroseconds, ...], Meta(max_length=MAX_ROUTE_HOPS)] = ()


class Probe(Body, frozen=True):
    """A test of bandwidth: the payload is filler. It is answered by PROBE with `answer_bytes` of payload, which asks for none."""

    answer_bytes: Annotated[int, Meta(ge=0, le=MAX_PROBE_BYTES)] = 0


MEASURING_BODIES: dict[FrameKind, type[Body]] = {FrameKind.RAN: Ran, FrameKind.PROBE: Probe}
