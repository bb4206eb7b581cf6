"""Report that a peer computes falsely: signed by the peer that found it, with the accused peer's own signed statement.

Format: `protocol/records.md`. No user wrote the text: its beginning is random, the rest was drawn by the swarm. A
reader of a report has the accused and other peers compute such a text, and believes only that result.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from swarmnode.codec.audit_messages import MAX_STATEMENT_BYTES
from swarmnode.codec.body import TokenId
from swarmnode.codec.training_fields import Peer
from swarmnode.errors import ErrorCode, ProtocolError
from swarmnode.swarm.records.signed import PeerSigned, Signable, Verify
from swarmnode.swarm.records.statement import Statement, open_statement

DOMAIN = b"swarmnode report 1\n"
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


_KIND = PeerSigned("report", Report, domain=DOMAIN, max_bytes=MAX_REPORT_BYTES, author="author")
sign_report = _KIND.sign


def open_report(raw: bytes, swarm: bytes, verify: Verify) -> tuple[Report, Statement]:
    """Open a report and the accused's statement in it. Raises ProtocolError if either is not signed, or the statement
    does not fit."""
    report = _KIND.open(raw, swarm, verify)
    statement = open_statement(report.statement, swarm, verify)
    if statement.peer != report.accused or statement.first + statement.count >= len(report.ids):
        text = "its report contains a statement about something else"
        raise ProtocolError(text, code=ErrorCode.REFUSED, peer=report.author)
    return report, statement
