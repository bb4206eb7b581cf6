"""Branch: a session that begins as another one of the same client does, which its hops need not compute again."""

from __future__ import annotations

import hashlib
import struct
from typing import Annotated

from msgspec import Meta

from swarmnode.codec.body import MAX_POSITIONS, Body

PROOF_BYTES = 32
BRANCH_DOMAIN = b"swarmnode-branch-1\0"
_PLACE = struct.Struct("<II")


class Branch(Body, frozen=True):
    """The first `length` positions are another session's. `proof` shows which one to a hop that has it, and nothing to others."""

    proof: Annotated[bytes, Meta(min_length=PROOF_BYTES, max_length=PROOF_BYTES)]
    length: Annotated[int, Meta(ge=1, le=MAX_POSITIONS)]


def branch_proof(source: bytes, truncations: int, session: bytes, length: int) -> bytes:
    """That whoever opens `session` knows the id of its source, as that was after so many truncations: the SHA-256 of both ids and
    both numbers. It is of use for this one session, and for no text that the source had before or has after."""
    return hashlib.sha256(BRANCH_DOMAIN + source + session + _PLACE.pack(truncations, length)).digest()
