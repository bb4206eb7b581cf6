"""Statements of a hop about a part of a session, and commitments of a stage to its microbatches, signed with the peer's
own key.

Format: `protocol/records.md`. A hop makes a statement only when asked, from what it keeps anyway for sending again. Any
peer that has the statement can show it to others. It binds the hop to its input, its output, and the sketches of both.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from swarmnode.codec.audit_messages import MAX_SKETCHED, MAX_STATEMENT_BYTES, Seed
from swarmnode.codec.body import MAX_POSITIONS, Position, SessionId, Step, Unit
from swarmnode.codec.spot_check_messages import DIGEST_BYTES, MAX_COMMITMENT_BYTES, MAX_ENTRIES, Digest
from swarmnode.codec.training_fields import Peer, RunId
from swarmnode.swarm.records.announcement import MAX_FORMAT_CHARS
from swarmnode.swarm.records.signed import PeerSigned, Signable

DOMAIN = b"swarmnode statement 1\n"
COMMITMENT_DOMAIN = b"swarmnode commitment 1\n"


class Commitment(Signable, frozen=True):
    """Signed promise of a training peer about the `count` microbatches that it has computed in a step, given before spot checks.
    `entries` is the SHA-256 of their records (`codec/spot_check_messages.py`)."""

    swarm: bytes
    peer: Peer
    run: RunId
    step: Step
    count: Annotated[int, Meta(ge=0, le=MAX_ENTRIES)]
    entries: Digest

    def __repr__(self) -> str:
        return f"<Commitment of {self.peer[-8:]} to {self.count} microbatches of step {self.step}>"


_COMMITMENT_KIND = PeerSigned(
    "commitment", Commitment, domain=COMMITMENT_DOMAIN, max_bytes=MAX_COMMITMENT_BYTES, author="peer"
)
sign_commitment, open_commitment = _COMMITMENT_KIND.sign, _COMMITMENT_KIND.open


class Edge(msgspec.Struct, array_like=True, frozen=True):
    """Content of one edge of a session: the running digest of its frames for positions [base, length).

    For token ids, which may arrive in any pieces, it is the SHA-256 of all ids as int64, and `base` is 0. For the
    tokens that a last hop sent out it is the same, from the position of the first token on. Empty if there is no such
    edge.
    """

    digest: bytes = b""
    base: int = 0
    length: int = 0


class Statement(Signable, frozen=True):
    """Signed statement of a hop about its work on positions [first, first + count) of a session, in layers [start, end) of the
    model."""

    swarm: bytes
    peer: Peer
    session: SessionId
    start: Unit
    end: Unit
    number_format: Annotated[str, Meta(max_length=MAX_FORMAT_CHARS)]
    codec: Annotated[int, Meta(ge=0, le=0xFF)]  # of the states sent on
    seed: Seed
    first: Position
    count: Annotated[int, Meta(ge=1, le=MAX_SKETCHED)]
    received: Edge
    sent: Edge
    sketches: Digest  # SHA-256 of the payload

    def __repr__(self) -> str:
        end = self.first + self.count
        return f"<Statement of {self.peer[-8:]} on [{self.start}:{self.end}) positions {self.first} to {end - 1}>"

    def rules(self) -> dict[str, bool]:
        return {
            "units": self.start < self.end,
            "number format": self.number_format.isprintable(),
            "edges": all(_is_edge(edge, self) for edge in (self.received, self.sent)),
        }


def _is_edge(edge: Edge, statement: Statement) -> bool:
    if edge == Edge():
        return True
    covers = edge.base <= edge.length and statement.first + statement.count <= edge.length <= MAX_POSITIONS
    return len(edge.digest) == DIGEST_BYTES and edge.base >= 0 and covers


_KIND = PeerSigned("statement", Statement, domain=DOMAIN, max_bytes=MAX_STATEMENT_BYTES, author="peer")
sign_statement, open_statement = _KIND.sign, _KIND.open
