"""Statements of a hop about a part of a session, and commitments of a stage to its microbatches, signed with the peer's
own key.

Format: `protocol/records.md`. A hop makes a statement only when asked, from what it keeps anyway for sending again. Any
peer that has the statement can show it to others. It binds the hop to its input, its output, and the sketches of both.

Report that a peer computes falsely: signed by the peer that found it, with the accused peer's own signed statement.

Format: `protocol/records.md`. No user wrote the text: its beginning is random, the rest was drawn by the swarm. A
reader of a report has the accused and other peers compute such a text, and believes only that result.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from swarmnode.codec.audit_messages import (
    DIGEST_BYTES,
    MAX_COMMITMENT_BYTES,
    MAX_ENTRIES,
    MAX_SKETCHED,
    MAX_STATEMENT_BYTES,
    Digest,
    Seed,
)
from swarmnode.codec.body import MAX_POSITIONS, Position, SessionId, Step, TokenId, Unit
from swarmnode.codec.training_messages import Peer, RunId
from swarmnode.errors import ErrorCode, ProtocolError
from swarmnode.swarm.records.announcement import MAX_FORMAT_CHARS, BitsClass
from swarmnode.swarm.records.signed import PeerSigned, Signable, Verify

DOMAIN = b"swarmnode statement 1\n"
COMMITMENT_DOMAIN = b"swarmnode commitment 1\n"


class Commitment(Signable, frozen=True):
    """Signed promise of a training peer about the `count` microbatches that it has computed in a step, given before spot checks.
    `entries` is the SHA-256 of their records (`codec/audit_messages.py`)."""

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
    bits: BitsClass = b""  # of the peer, if all that the session computed is of it

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


REPORT_DOMAIN = b"swarmnode report 1\n"
MAX_REPORT_BYTES = 3072
MAX_IDS = 128


class Report(Signable, frozen=True):
    """Accusation about the text `ids`, whose first `prompt` tokens were drawn at random. `statement` is what the
    accused signed."""

    swarm: bytes
    author: Peer
    accused: Peer
    at: Annotated[float, Meta(gt=0, lt=1e18)]  # unix time, seconds
    prompt: Annotated[int, Meta(ge=1)]
    ids: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_IDS)]
    statement: Annotated[bytes, Meta(min_length=1, max_length=MAX_STATEMENT_BYTES)]

    def __repr__(self) -> str:
        return f"<Report by {self.author[-8:]} of {self.accused[-8:]}>"

    def rules(self) -> dict[str, bool]:
        return {"accused": self.accused != self.author, "text": self.prompt < len(self.ids)}


_REPORT_KIND = PeerSigned("report", Report, domain=REPORT_DOMAIN, max_bytes=MAX_REPORT_BYTES, author="author")
sign_report = _REPORT_KIND.sign


def open_report(raw: bytes, swarm: bytes, verify: Verify) -> tuple[Report, Statement]:
    """Open a report and the accused's statement in it. Raises ProtocolError if either is not signed, or the statement
    does not fit."""
    report = _REPORT_KIND.open(raw, swarm, verify)
    statement = open_statement(report.statement, swarm, verify)
    if statement.peer != report.accused or statement.first + statement.count >= len(report.ids):
        text = "its report contains a statement about something else"
        raise ProtocolError(text, code=ErrorCode.REFUSED, peer=report.author)
    return report, statement
