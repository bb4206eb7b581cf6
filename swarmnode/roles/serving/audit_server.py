"""A hop's statements for whoever knows a session's id: the answering side, and asking a hop for one."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from swarmnode.codec.audit_messages import SKETCH_BYTES, GetStatement, StatementReply
from swarmnode.codec.frames import Frame
from swarmnode.codec.messages import Body, Error, Hello, Open
from swarmnode.compute.serving.sketch import read_sketches, sketch, sketch_bytes
from swarmnode.errors import ErrorCode, PeerLost, ProtocolError
from swarmnode.net.identity import verify
from swarmnode.net.interfaces import Buffer, Network, PeerId
from swarmnode.net.links.link import LinkConfig
from swarmnode.net.links.switchboard import Channel, Switchboard
from swarmnode.net.tasks import Tasks
from swarmnode.roles.fetching.sources import ask
from swarmnode.roles.serving.client import AUDIT_PROTOCOL
from swarmnode.roles.serving.opened import units_of
from swarmnode.roles.serving.session import StageSession
from swarmnode.roles.serving.transcript import Conveyed
from swarmnode.swarm.records.announcement import Sign
from swarmnode.swarm.records.statement import Statement, open_statement, sign_statement

log = logging.getLogger(__name__)

BUSY_RETRY_S = 1.0


@dataclass(frozen=True)
class Author:
    """Who states, of which swarm, and in which number format it computes."""

    peer: PeerId
    swarm: bytes
    number_format: str
    sign: Sign


class AuditServer:
    """Answers for the sessions that `find` knows: to each peer one question at a time, since an answer is so much longer."""

    def __init__(
        self,
        network: Network,
        hello: Hello,
        link_config: LinkConfig,
        author: Author,
        find: Callable[[bytes], StageSession | None],
    ) -> None:
        self._author = author
        self._find = find
        self._answering: set[PeerId] = set()
        self._tasks = Tasks("statements", on_crash=link_config.supervisor.ends_conversation)
        config = replace(link_config, max_payload_bytes=0)
        self._board = Switchboard(network, AUDIT_PROTOCOL, hello, config, accept=self._accept)

    def __repr__(self) -> str:
        return f"<AuditServer {self._board!r}>"

    async def start(self) -> None:
        """Answer from now on."""
        await self._board.start()

    async def close(self) -> None:
        """End all links."""
        await self._board.close()
        await self._tasks.close()

    def _accept(self, channel: Channel, _frame: Frame, body: Body) -> None:
        if not isinstance(body, GetStatement):
            channel.close(Error(ErrorCode.MALFORMED))
            return
        session = self._find(body.session)
        if session is None:
            channel.close(Error(ErrorCode.NO_SESSION))
        elif channel.peer in self._answering:
            channel.close(Error(ErrorCode.BUSY, BUSY_RETRY_S))
        else:
            self._answering.add(channel.peer)
            received, sent = session.transcript.received, session.transcript.sent
            self._tasks.spawn(self._answer(channel, body, session.opened, received, sent), f"answer {channel.peer}")

    async def _answer(
        self, channel: Channel, question: GetStatement, opened: Open, received: Conveyed, sent: Conveyed
    ) -> None:
        try:
            if question.first + question.count > received.length or (
                opened.index + 1 < len(opened.route) and question.first + question.count > sent.length
            ):
                channel.close(Error(ErrorCode.INVALID_REQUEST))
                return
            statement, payload = await asyncio.to_thread(_state, self._author, question, opened, received, sent)
            channel.send(StatementReply(statement), payload=(payload,))
            channel.close()
            await channel.drain()
        except PeerLost as error:
            log.debug("%s", error)
        finally:
            self._answering.discard(channel.peer)


def _state(
    author: Author, question: GetStatement, opened: Open, received: Conveyed, sent: Conveyed
) -> tuple[bytes, bytes]:
    """The signed statement, and its sketches."""
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
        sent=sent.edge(),
        sketches=hashlib.sha256(payload).digest(),
    )
    return sign_statement(statement, author.sign), payload


@dataclass(frozen=True)
class HopAccount:
    """A hop's statement with its sketches: None of token ids, and of what the last hop brings forth."""

    statement: Statement
    raw: bytes
    received_TK: Tensor | None
    sent_TK: Tensor | None


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


async def fetch_account(board: Switchboard, peer: PeerId, question: GetStatement, swarm: bytes) -> HopAccount:
    """A hop's answer to a question. Raises ProtocolError where it does not answer it, PeerLost, PeerRefused, NetworkDown."""
    async for frame, body in ask(board, peer, question):
        if isinstance(body, StatementReply):
            account = read_account(body.statement, frame.payload, swarm)
            said = account.statement
            asked = (peer, question.session, question.seed, question.first, question.count)
            if (said.peer, said.session, said.seed, said.first, said.count) != asked:
                raise ProtocolError("a statement of something else than was asked", peer=peer)
            return account
    raise ProtocolError("no statement", peer=peer)
