"""Bodies of `/swarmnode/audit/1`: a hop's statement about its inputs and outputs in a session (`protocol/frames.md`).

GET_STATEMENT, STATEMENT    the question and its answer; ERROR NO_SESSION from a peer that does not know the session
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from typing import Annotated, Union

from msgspec import Meta

from swarmnode.codec.body import MAX_POSITIONS, Body, Position, SessionId
from swarmnode.codec.frames import FrameKind
from swarmnode.errors import ProtocolError

AUDIT_PROTOCOL = "/swarmnode/audit/1"
SKETCH_VALUES = 32
SKETCH_BYTES = 4 * SKETCH_VALUES  # per position: float32, little-endian
SEED_BYTES = 16
MAX_SKETCHED = 512  # positions in one question
MAX_STATEMENT_BYTES = 1024

Seed = Annotated[bytes, Meta(min_length=SEED_BYTES, max_length=SEED_BYTES)]
_ENTRY = struct.Struct("<II")


class GetStatement(Body, frozen=True):
    """Question to a hop of a session for sketches of positions [first, first + count), by projections that follow from `seed`.

    The statement is about the first `length` positions of the session (0: all). Later ones may hold guesses behind the text's end.
    """

    session: SessionId
    seed: Seed
    first: Position
    count: Annotated[int, Meta(ge=1, le=MAX_SKETCHED)]
    length: Position = 0

    def check(self) -> None:
        if self.first + self.count > MAX_POSITIONS:
            raise ProtocolError("a GET_STATEMENT ends beyond the last position")


class StatementReply(Body, frozen=True):
    """Answer to GET_STATEMENT: a signed statement (`protocol/records.md`).

    The payload holds sketches of the hop's inputs (not if they are token ids), then of its outputs (not if the hop is the last):
    SKETCH_VALUES float32 values per position.
    """

    statement: Annotated[bytes, Meta(max_length=MAX_STATEMENT_BYTES)]


def running_digest(entries: Iterable[tuple[int, int, Union[bytes, bytearray, memoryview]]]) -> bytes:
    """Return the digest of the data on one edge of a session, from (start, count, payload) of its INPUT frames in order.

    It begins as 32 zero bytes; each frame makes it the SHA-256 of itself, start, count and the SHA-256 of the payload.
    """
    digest = bytes(32)
    for start, count, payload in entries:
        digest = hashlib.sha256(digest + _ENTRY.pack(start, count) + hashlib.sha256(payload).digest()).digest()
    return digest


AUDIT_BODIES: dict[FrameKind, type[Body]] = {
    FrameKind.GET_STATEMENT: GetStatement,
    FrameKind.STATEMENT: StatementReply,
}
