"""Audit server: a hop's signed statements on its sessions, for peers that know a session's id."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from swarmnode.codec.audit_messages import AUDIT_PROTOCOL, GetStatement, StatementReply
from swarmnode.codec.messages import Error, Open
from swarmnode.compute.serving.sketch import sketch, sketch_bytes
from swarmnode.errors import ErrorCode
from swarmnode.net.addressing.addresses import Claimant
from swarmnode.net.interfaces import PeerId
from swarmnode.peer.questions import Answer, LocalPeer, QuestionServer
from swarmnode.serving.session.opening import units_of
from swarmnode.serving.session.session import StageSession
from swarmnode.serving.session.session_streams import Conveyed
from swarmnode.swarm.records.signed import Sign
from swarmnode.swarm.records.statement import Edge, Statement, sign_statement


@dataclass(frozen=True)
class Author:
    """Author of statements: its peer id, swarm, number format and signing function."""

    peer: PeerId
    swarm: bytes
    number_format: str
    sign: Sign


def audit_server(peer: LocalPeer, author: Author, find: Callable[[bytes], StageSession | None]) -> QuestionServer:
    """Make the server that answers questions about the sessions that `find` returns.

    It answers NO_SESSION for an unknown session, INVALID_REQUEST for positions that were not computed or are not kept.
    """

    async def answer(_asker: Claimant, question: GetStatement) -> Answer:
        session = find(question.session)
        if session is None:
            return Answer(Error(ErrorCode.NO_SESSION))
        opened, transcript = session.opened, session.transcript
        received, sent = transcript.received.until(question.length), transcript.sent.until(question.length)
        told = transcript.told
        is_last = opened.index + 1 == len(opened.route)
        if question.first + question.count > min(received.length, told.length if is_last else sent.length):
            return Answer(Error(ErrorCode.INVALID_REQUEST))
        statement, payload = await asyncio.to_thread(_state, author, question, opened, received, sent, told)
        return Answer(StatementReply(statement), (payload,))

    return QuestionServer(peer, AUDIT_PROTOCOL, GetStatement, answer)


def _state(
    author: Author, question: GetStatement, opened: Open, received: Conveyed, sent: Conveyed, told: Edge
) -> tuple[bytes, bytes]:
    """Return the signed statement of a hop's work that answers `question`, and the sketches of its inputs and outputs."""
    sketched = [edge for edge in (received, sent) if edge.entries and not edge.is_ids]
    hidden = (edge.hidden(question.first, question.count) for edge in sketched)
    payload = b"".join(sketch_bytes(sketch(hidden_TH, question.seed)) for hidden_TH in hidden)
    start, end = units_of(opened)
    statement = Statement(
        swarm=author.swarm,
        peer=author.peer,
        session=question.session,
        start=start,
        end=end,
        number_format=author.number_format,
        codec=sent.codec,
        seed=question.seed,
        first=question.first,
        count=question.count,
        received=received.edge(),
        sent=sent.edge() if sent.entries else told,
        sketches=hashlib.sha256(payload).digest(),
    )
    return sign_statement(statement, author.sign), payload
