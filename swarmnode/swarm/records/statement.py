"""Statements of a hop about a part of a session, and commitments of a stage to its microbatches, signed with the peer's
own key.

Format: `protocol/records.md`. A hop makes a statement only when asked, from what it keeps anyway for sending again. Any
peer that has the statement can show it to others. It binds the hop to its input, its output, and the sketches of both.

Receipt of a text: the text, how it was drawn, and a statement of each hop with the root of its digests and its class of equal bits.
Anyone who has it can have peers of these classes compute the text again (`swarmnode verify`).

Report that a peer computes falsely: signed by the peer that found it, with the accused peer's own signed statement.

Format: `protocol/records.md`. No user wrote the text: its beginning is random, the rest was drawn by the swarm. A
reader of a report has the accused and other peers compute such a text, and believes only that result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
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
from swarmnode.codec.body import MAX_POSITIONS, Position, SessionId, Step, TokenId, Unit, first_broken
from swarmnode.codec.messages import LinkCodec
from swarmnode.codec.sampling import Sampling
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


TEXT_DOMAIN = b"swarmnode text receipt 1\n"
MAX_RECEIPT_IDS = 8192
MAX_ACCOUNTS = 64  # hops
MAX_PARTS = MAX_RECEIPT_IDS // MAX_SKETCHED + 1  # statements of one hop
MAX_TEXT_RECEIPT_BYTES = 1 << 21
MAX_CODECS = 4096
_RawStatement = Annotated[bytes, Meta(min_length=1, max_length=MAX_STATEMENT_BYTES)]
_RawHop = Annotated[tuple[_RawStatement, ...], Meta(min_length=1, max_length=MAX_PARTS)]


class TextReceipt(Signable, frozen=True):
    """Receipt of the text `ids`, drawn by `sampling` behind a prompt, signed by the client that ordered it.

    `accounts` has for each hop, in order, its signed statements on positions 0 to the last but one of the text. The field
    `sketches` of each is the root of the position's digests, if the statement names a class. `codec` and `codecs` say how
    states crossed the edges.
    """

    swarm: bytes
    client: Peer
    at: Annotated[float, Meta(gt=0, lt=1e18)]  # unix time, seconds
    ids: Annotated[tuple[TokenId, ...], Meta(min_length=2, max_length=MAX_RECEIPT_IDS)]
    sampling: Sampling
    codec: Annotated[int, Meta(ge=0, le=0xFF)]
    codecs: Annotated[tuple[LinkCodec, ...], Meta(max_length=MAX_CODECS)]
    accounts: Annotated[tuple[_RawHop, ...], Meta(min_length=1, max_length=MAX_ACCOUNTS)]

    def __repr__(self) -> str:
        return f"<TextReceipt of {self.client[-8:]}: {len(self.ids)} tokens over {len(self.accounts)} hops>"

    def rules(self) -> dict[str, bool]:
        return {"prompt": self.sampling.prompt_length < len(self.ids)}


_TEXT_KIND = PeerSigned(
    "text receipt", TextReceipt, domain=TEXT_DOMAIN, max_bytes=MAX_TEXT_RECEIPT_BYTES, author="client"
)
sign_text_receipt = _TEXT_KIND.sign


def open_text_receipt(
    raw: bytes, swarm: bytes, verify: Verify, ids_digest: Callable[[Sequence[int]], bytes]
) -> tuple[TextReceipt, list[list[Statement]]]:
    """Open a receipt of a text, and the statements of each hop in it.

    Raises ProtocolError if a signature or the swarm is wrong, or the statements are not about this text over one chain of hops.
    """
    receipt = _TEXT_KIND.open(raw, swarm, verify)
    for body in (receipt.sampling, *receipt.codecs):
        body.check()
    hops = [[open_statement(one, swarm, verify) for one in parts] for parts in receipt.accounts]
    first, held = hops[0][0], len(receipt.ids) - 1
    places = [(at, min(MAX_SKETCHED, held - at)) for at in range(0, held, MAX_SKETCHED)]
    told, taken = hops[-1][0].sent, first.received
    rules = {
        "one session and one seed": {(one.session, one.seed) for parts in hops for one in parts}
        == {(first.session, first.seed)},
        "statements on all positions": all([(one.first, one.count) for one in parts] == places for parts in hops),
        "statements of one hop that agree": all(
            msgspec.structs.replace(one, first=0, count=1, sketches=first.sketches)
            == msgspec.structs.replace(parts[0], first=0, count=1, sketches=first.sketches)
            for parts in hops
            for one in parts
        ),
        "hops in a chain from layer 0 on": first.start == 0
        and all(before[0].end == after[0].start for before, after in pairwise(hops)),
        "edges whose ends agree": all(before[0].sent == after[0].received for before, after in pairwise(hops)),
        "the text that went in": taken.length <= len(receipt.ids)
        and taken.digest == ids_digest(receipt.ids[: taken.length]),
        "the tokens that came out": told.length <= len(receipt.ids)
        and told.base <= receipt.sampling.prompt_length
        and told.digest == ids_digest(receipt.ids[told.base : told.length]),
    }
    if (broken := first_broken(rules)) is not None:
        raise ProtocolError(f"its statements are not those of its text: it lacks {broken}", peer=receipt.client)
    return receipt, hops
