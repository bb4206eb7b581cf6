"""Bodies of `/swarmnode/infer/1`: forward passes through layers of a graph (`protocol/frames.md`).

INFER, INFERRED             the question and its answer; ERROR from a peer that cannot, or has no room now
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from swarmnode.codec.body import SESSION_ID_BYTES, Body, Unit
from swarmnode.codec.frames import FrameKind
from swarmnode.codec.training_fields import Duration, Values, check_rules, check_values

INFER_PROTOCOL = "/swarmnode/infer/1"


class Infer(Body, frozen=True):
    """Question for a pass through layers [start, end). The payload is the values before layer `start`, one after another."""

    start: Unit
    end: Unit
    values: Values
    within_s: Duration = 0.0  # seconds that the client waits for the answer; 0: without limit
    # Id of the work in the client's receipt; empty: there will be none.
    work: Annotated[bytes, Meta(max_length=SESSION_ID_BYTES)] = b""

    def check(self) -> None:
        check_rules("INFER", {"units": self.start < self.end, "work": len(self.work) in (0, SESSION_ID_BYTES)})
        check_values(self.values)


class Inferred(Body, frozen=True):
    """Answer to INFER: the values before layer `end`, or after the last layer the graph's results. Ends the conversation."""

    values: Values

    def check(self) -> None:
        check_values(self.values)


INFERENCE_BODIES: dict[FrameKind, type[Body]] = {FrameKind.INFER: Infer, FrameKind.INFERRED: Inferred}
