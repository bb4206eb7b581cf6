"""A hop's account of a session, fetched and verified: its signed statement and the sketches that the statement covers."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from swarmnode.codec.audit_messages import MAX_SKETCHED, SKETCH_BYTES, GetStatement, StatementReply
from swarmnode.compute.serving.sketch import read_sketches
from swarmnode.errors import ErrorCode, PeerRefused, ProtocolError
from swarmnode.net.identity import verify
from swarmnode.net.interfaces import Buffer, PeerId
from swarmnode.net.links.switchboard import Switchboard
from swarmnode.peer.questions import BUSY_RETRY_S, ask_one
from swarmnode.swarm.records.statement import Statement, open_statement


@dataclass(frozen=True)
class HopAccount:
    """Account of one hop for positions [0, T): its last `statement`, the signed bytes of it (`raw`), and the sketches
    of both edges.

    `received_TK` is None if the hop received token ids, `sent_TK` is None if the hop sent no states (the last hop).
    """

    statement: Statement
    raw: bytes
    received_TK: Tensor | None
    sent_TK: Tensor | None


async def fetch_account(
    board: Switchboard, peer: PeerId, session: bytes, seed: bytes, end: int, swarm: bytes, *, length: int = 0
) -> HopAccount:
    """Fetch the account of `peer` for positions [0, `end`) of `session`, with sketches by `seed`. The text has `length` positions
    (0: all that the session has).

    Raises ProtocolError if the account is invalid or its parts disagree; PeerLost, PeerRefused or NetworkDown if there
    is no answer.
    """
    parts: list[HopAccount] = []
    for first in range(0, end, MAX_SKETCHED):
        question = GetStatement(session, seed, first, min(MAX_SKETCHED, end - first), length)
        parts.append(await _ask(board, peer, question, swarm))
    return _joined(parts)


async def _ask(board: Switchboard, peer: PeerId, question: GetStatement, swarm: bytes) -> HopAccount:
    """Ask one question, again while the peer is BUSY with another one. Raises ProtocolError if the answer is to another
    question."""
    while True:
        try:
            body, payload = await ask_one(board, peer, question, StatementReply)
            break
        except PeerRefused as error:
            if error.code is not ErrorCode.BUSY:
                raise
            await asyncio.sleep(error.retry_s or BUSY_RETRY_S)
    account = read_account(body.statement, payload, swarm)
    said = account.statement
    asked = (peer, question.session, question.seed, question.first, question.count)
    if (said.peer, said.session, said.seed, said.first, said.count) != asked:
        raise ProtocolError("its statement answers another question", peer=peer)
    return account


def read_account(raw: bytes, payload: Buffer, swarm: bytes) -> HopAccount:
    """Decode and verify a hop's answer. Raises ProtocolError if the statement or the sketches are not as their author
    signed them."""
    statement = open_statement(raw, swarm, verify)
    if hashlib.sha256(payload).digest() != statement.sketches:
        raise ProtocolError("it did not sign these sketches", peer=statement.peer)
    size_bytes = statement.count * SKETCH_BYTES
    received_TK = read_sketches(payload[:size_bytes], statement.count) if statement.start > 0 else None
    rest = payload[size_bytes:] if received_TK is not None else payload
    sent_TK = read_sketches(rest, statement.count) if len(rest) else None
    return HopAccount(statement, raw, received_TK, sent_TK)


def _joined(parts: Sequence[HopAccount]) -> HopAccount:
    """Join the parts of one account. Raises ProtocolError if their statements differ in more than positions and
    sketches."""
    last = parts[-1].statement
    for part in parts:
        said = part.statement
        as_last = msgspec.structs.replace(said, first=last.first, count=last.count, sketches=last.sketches)
        if as_last != last or (part.sent_TK is None) != (parts[-1].sent_TK is None):
            raise ProtocolError("two of its statements about one session contradict each other", peer=last.peer)
    received_TK, sent_TK = (
        _together(edge) for edge in zip(*((part.received_TK, part.sent_TK) for part in parts), strict=True)
    )
    return HopAccount(last, parts[-1].raw, received_TK, sent_TK)


def _together(parts: Sequence[Tensor | None]) -> Tensor | None:
    known = [part_TK for part_TK in parts if part_TK is not None]
    return torch.cat(known) if known else None
