"""The statement: what a hop says of a part of a session, signed with its own key (`protocol/records.md`).

Made only when it is asked for, from what the hop keeps anyway to be able to send it again. Whoever has it can show it to others: it
binds the hop to what it took in, to what it sent on, and to the sketches of both.
"""

from __future__ import annotations

import msgspec

from swarmnode.codec.audit_messages import MAX_SKETCHED, MAX_STATEMENT_BYTES, SEED_BYTES
from swarmnode.codec.body import MAX_POSITIONS, MAX_UNITS, SESSION_ID_BYTES
from swarmnode.net.interfaces import PeerId
from swarmnode.swarm.records.announcement import MAX_FORMAT_CHARS, MAX_PEER_CHARS
from swarmnode.swarm.records.signed import PeerSigned, Sign, Verify

DOMAIN = b"swarmnode statement 1\n"
DIGEST_BYTES = 32


class Edge(msgspec.Struct, array_like=True, frozen=True):
    """What went over one edge of a session: the running digest of its frames for positions [base, length).

    Of token ids, which come in many ways, it is the SHA-256 of all of them as int64, and `base` is 0. Of the tokens that a last hop
    told it is the same, from the position of the first one on. Empty where there is no such edge.
    """

    digest: bytes = b""
    base: int = 0
    length: int = 0


class Statement(msgspec.Struct, array_like=True, frozen=True):
    """Of positions [first, first + count) of a session in units [start, end) of the model."""

    swarm: bytes
    peer: PeerId
    session: bytes
    start: int
    end: int
    number_format: str
    codec: int  # of what was sent on
    seed: bytes
    first: int
    count: int
    received: Edge
    sent: Edge
    sketches: bytes  # SHA-256 of the payload

    def __repr__(self) -> str:
        end = self.first + self.count
        return f"<Statement of {self.peer[-8:]} on [{self.start}:{self.end}) positions {self.first} to {end - 1}>"


def _rules(statement: Statement) -> dict[str, bool]:
    """What each field must keep to, and whether it does."""
    return {
        "peer": 0 < len(statement.peer) <= MAX_PEER_CHARS,
        "session": len(statement.session) == SESSION_ID_BYTES,
        "units": 0 <= statement.start < statement.end <= MAX_UNITS,
        "number format": len(statement.number_format) <= MAX_FORMAT_CHARS and statement.number_format.isprintable(),
        "codec": 0 <= statement.codec <= 0xFF,
        "seed": len(statement.seed) == SEED_BYTES,
        "positions": 0 <= statement.first <= MAX_POSITIONS and 0 < statement.count <= MAX_SKETCHED,
        "edges": all(_is_edge(edge, statement) for edge in (statement.received, statement.sent)),
        "sketches": len(statement.sketches) == DIGEST_BYTES,
    }


def _is_edge(edge: Edge, statement: Statement) -> bool:
    if edge == Edge():
        return True
    covers = edge.base <= edge.length and statement.first + statement.count <= edge.length <= MAX_POSITIONS
    return len(edge.digest) == DIGEST_BYTES and edge.base >= 0 and covers


_KIND = PeerSigned("statement", Statement, domain=DOMAIN, rules=_rules, author=lambda statement: statement.peer)


def sign_statement(statement: Statement, sign: Sign) -> bytes:
    """The bytes that bind its author."""
    return msgspec.msgpack.encode(_KIND.sign(statement, sign))


def open_statement(raw: bytes, swarm: bytes, verify: Verify) -> Statement:
    """The statement in these bytes. Raises ProtocolError where it is not its peer's, or not of this swarm."""
    return _KIND.open(_KIND.read(raw, MAX_STATEMENT_BYTES), swarm, verify)
