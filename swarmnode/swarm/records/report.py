"""The report: that a peer computes falsely, signed by who found it, with what the accused itself signed (`protocol/records.md`).

The text is one that nobody wrote: a random beginning, and what the swarm made of it. Who reads a report is to have the same text
computed by the accused and by others, and to believe what comes of that.
"""

from __future__ import annotations

import msgspec

from swarmnode.codec.audit_messages import MAX_STATEMENT_BYTES
from swarmnode.codec.body import MAX_TOKEN_ID
from swarmnode.errors import ErrorCode, ProtocolError
from swarmnode.net.interfaces import PeerId
from swarmnode.swarm.records.announcement import MAX_PEER_CHARS
from swarmnode.swarm.records.signed import PeerSigned, Sign, Verify
from swarmnode.swarm.records.statement import Statement, open_statement

DOMAIN = b"swarmnode report 1\n"
MAX_REPORT_BYTES = 3072
MAX_IDS = 128


class Report(msgspec.Struct, array_like=True, frozen=True):
    """Of the text `ids`, of which the first `prompt` were drawn at random. `statement` is what the accused said of it."""

    swarm: bytes
    author: PeerId
    accused: PeerId
    at: float  # unix time, seconds
    prompt: int
    ids: tuple[int, ...]
    statement: bytes

    def __repr__(self) -> str:
        return f"<Report by {self.author[-8:]} of {self.accused[-8:]}>"


def _rules(report: Report) -> dict[str, bool]:
    """What each field must keep to, and whether it does."""
    return {
        "author": 0 < len(report.author) <= MAX_PEER_CHARS,
        "accused": 0 < len(report.accused) <= MAX_PEER_CHARS and report.accused != report.author,
        "at": 0 < report.at < 1e18,
        "text": 0 < report.prompt < len(report.ids) <= MAX_IDS and all(0 <= one <= MAX_TOKEN_ID for one in report.ids),
        "statement": 0 < len(report.statement) <= MAX_STATEMENT_BYTES,
    }


_KIND = PeerSigned("report", Report, domain=DOMAIN, rules=_rules, author=lambda report: report.author)


def sign_report(report: Report, sign: Sign) -> bytes:
    """The bytes to store."""
    return msgspec.msgpack.encode(_KIND.sign(report, sign))


def open_report(raw: bytes, swarm: bytes, verify: Verify) -> tuple[Report, Statement]:
    """The report in these bytes, and what its accused said. Raises ProtocolError where either is not its author's."""
    report = _KIND.open(_KIND.read(raw, MAX_REPORT_BYTES), swarm, verify)
    statement = open_statement(report.statement, swarm, verify)
    if statement.peer != report.accused or statement.first + statement.count >= len(report.ids):
        text = "a report with a statement of something else"
        raise ProtocolError(text, code=ErrorCode.REFUSED, peer=report.author)
    return report, statement
