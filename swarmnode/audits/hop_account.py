"""What a hop says that it did in a session, asked for and read: its statement, and the sketches that it signed with it."""

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
    """Of positions [0, T): `statement` is the one of the last of them, `raw` as it was signed. Sketches are None of token ids, and
    of what the last hop brings forth."""

    statement: Statement
    raw: bytes
    received_TK: Tensor | None
    sent_TK: Tensor | None


async def fetch_account(
    board: Switchboard, peer: PeerId, session: bytes, seed: bytes, end: int, swarm: bytes
) -> HopAccount:
    """A hop's account of positions [0, `end`). Raises ProtocolError where it is none, PeerLost, PeerRefused, NetworkDown."""
    parts: list[HopAccount] = []
    for first in range(0, end, MAX_SKETCHED):
        question = GetStatement(session, seed, first, min(MAX_SKETCHED, end - first))
        parts.append(await _ask(board, peer, question, swarm))
    return _joined(parts)


async def _ask(board: Switchboard, peer: PeerId, question: GetStatement, swarm: bytes) -> HopAccount:
    """Another question of ours may be on its way there: then this one comes after it."""
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
        raise ProtocolError("a statement of something else than was asked", peer=peer)
    return account


def read_account(raw: bytes, payload: Buffer, swarm: bytes) -> HopAccount:
    """What a hop answered. Raises ProtocolError where it is not what its author signed."""
    statement = open_statement(raw, swarm, verify)
    if hashlib.sha256(payload).digest() != statement.sketches:
        raise ProtocolError("sketches that their author did not sign", peer=statement.peer)
    size_bytes = statement.count * SKETCH_BYTES
    received_TK = read_sketches(payload[:size_bytes], statement.count) if statement.start > 0 else None
    rest = payload[size_bytes:] if received_TK is not None else payload
    sent_TK = read_sketches(rest, statement.count) if len(rest) else None
    return HopAccount(statement, raw, received_TK, sent_TK)


def _joined(parts: Sequence[HopAccount]) -> HopAccount:
    """The parts of one account, which must say the same of what they have in common. Raises ProtocolError."""
    last = parts[-1].statement
    for part in parts:
        said = part.statement
        as_last = msgspec.structs.replace(said, first=last.first, count=last.count, sketches=last.sketches)
        if as_last != last or (part.sent_TK is None) != (parts[-1].sent_TK is None):
            raise ProtocolError("one session, and two statements that do not fit", peer=last.peer)
    received_TK, sent_TK = (
        _together(edge) for edge in zip(*((part.received_TK, part.sent_TK) for part in parts), strict=True)
    )
    return HopAccount(last, parts[-1].raw, received_TK, sent_TK)


def _together(parts: Sequence[Tensor | None]) -> Tensor | None:
    known = [part_TK for part_TK in parts if part_TK is not None]
    return torch.cat(known) if known else None
