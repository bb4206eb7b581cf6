"""Bodies of frames that measure: a peer's speed while it works, the bandwidth between two peers, and the steps of a session at one
hop (`/swarmnode/trace/1`, `protocol/frames.md`)."""

from __future__ import annotations

import hashlib
from typing import Annotated

from msgspec import Meta

from swarmnode.codec.body import MAX_DRAFTS, MAX_POSITIONS, MAX_PROPOSERS, MAX_ROUTE_HOPS, Body, Code, Position, Unit
from swarmnode.codec.frames import FrameKind
from swarmnode.errors import ProtocolError

MAX_UNIT_US = (1 << 32) - 1
MAX_PROBE_BYTES = 512 * 1024
TRACE_ID_BYTES = 16
TRACE_DOMAIN = b"swarmnode-trace-1\x00"
MAX_TRACE_STEPS = 512
MAX_TRACE_US = (1 << 32) - 1
MAX_CAME_US = 1 << 48
MAX_BATCH = (1 << 16) - 1

UnitMicroseconds = Annotated[int, Meta(ge=0, le=MAX_UNIT_US)]
TraceId = Annotated[bytes, Meta(min_length=TRACE_ID_BYTES, max_length=TRACE_ID_BYTES)]
Microseconds = Annotated[int, Meta(ge=0, le=MAX_TRACE_US)]


def trace_id(session: bytes) -> bytes:
    """Return the public name of a session, for logs and questions. It is a one-way hash: a peer that knows the id itself may use
    the session."""
    return hashlib.sha256(TRACE_DOMAIN + session).digest()[:TRACE_ID_BYTES]


class GetTrace(Body, frozen=True):
    """Question for the peer's steps of the session with this trace id."""

    trace: TraceId


class TraceStep(Body, frozen=True):
    """Pass of a session at a hop: positions [end - count, end), and the time that they spent there.

    Durations are of the hop's own clock, and are never compared with another's. `came_us` counts from the session's first step at
    this hop. `stay_us`, from arrival to sending, is waiting, computing and the rest. The last `guessed` positions held guesses.
    """

    end: Position
    count: Annotated[int, Meta(ge=1, le=MAX_POSITIONS)]
    came_us: Annotated[int, Meta(ge=0, le=MAX_CAME_US)]
    wait_us: Microseconds
    compute_us: Microseconds
    stay_us: Microseconds
    batch: Annotated[int, Meta(ge=1, le=MAX_BATCH)]
    guessed: Annotated[int, Meta(ge=0, le=MAX_DRAFTS)] = 0


class DraftCount(Body, frozen=True):
    """Numbers of the guesses of one proposer (see ProposerKind) in a session: right ones, and wrong ones."""

    proposer: Code
    accepted: Position = 0
    wasted: Position = 0


class Trace(Body, frozen=True):
    """Answer to GET_TRACE: the hop's layers, and the last steps of the session there, the oldest first. The first hop adds the
    numbers of its guesses."""

    start: Unit
    end: Unit
    steps: Annotated[tuple[TraceStep, ...], Meta(max_length=MAX_TRACE_STEPS)] = ()
    drafts: Annotated[tuple[DraftCount, ...], Meta(max_length=MAX_PROPOSERS)] = ()

    def check(self) -> None:
        if self.start >= self.end:
            raise ProtocolError(f"a TRACE needs a range of layers, not {self.start}:{self.end}")
        if any(step.count > step.end for step in self.steps):
            raise ProtocolError("a TRACE has a step that begins before position 0")


TRACE_BODIES: dict[FrameKind, type[Body]] = {FrameKind.GET_TRACE: GetTrace, FrameKind.TRACE: Trace}


class Ran(Body, frozen=True):
    """Report that a decode step, which ended at position `seq`, has left the sender. It goes to the peers that sent the step (the
    hop before, the client, or the last hop of a ring), which so learn how long it took.

    `later_us` are the microseconds per layer of the hops after the sender, in the order of the route, each measured by the hop
    before it; 0 if unmeasured. In a ring the first hop comes after the last.
    """

    later_us: Annotated[tuple[UnitMicroseconds, ...], Meta(max_length=MAX_ROUTE_HOPS)] = ()


class Probe(Body, frozen=True):
    """Test of bandwidth; the payload is filler. The answer is a PROBE with a payload of `answer_bytes` that asks for no further
    answer."""

    answer_bytes: Annotated[int, Meta(ge=0, le=MAX_PROBE_BYTES)] = 0


MEASURING_BODIES: dict[FrameKind, type[Body]] = {FrameKind.RAN: Ran, FrameKind.PROBE: Probe}
