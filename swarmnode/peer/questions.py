"""Questions to one peer, and the server that answers them: to each peer one at a time, since an answer is much longer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from types import UnionType
from typing import Any, NamedTuple, TypeVar

from swarmnode.codec.body import Body
from swarmnode.codec.frames import Frame
from swarmnode.codec.messages import End, Error
from swarmnode.errors import ErrorCode, PeerError, PeerLost, ProtocolError, refusal
from swarmnode.net.interfaces import Buffer, PeerId
from swarmnode.net.limits.address_group import Claimant
from swarmnode.net.links.switchboard import Channel, Switchboard
from swarmnode.net.tasks import Tasks
from swarmnode.peer.local_peer import LocalPeer

log = logging.getLogger(__name__)

BUSY_RETRY_S = 1.0
SILENCE_S = 30.0  # for one answer: a chunk at 35 KB/s (a peer that hangs altogether is found by the link's heartbeat)
MAX_WAITING = 16  # answers that came and were not taken yet: more than a run of chunks has
Reply = TypeVar("Reply", bound=Body)


class Answer(NamedTuple):
    """What a question is answered with: an ERROR where it cannot be, END where there is nothing to say."""

    body: Body
    payload: Sequence[Buffer] = ()


@dataclass(eq=False)
class QuestionServer:
    """Server for questions of the type `question` (or of several): `answer` makes the answer of (asker, question). Questions carry
    no payload."""

    peer: LocalPeer
    protocol: str
    question: type[Body] | UnionType
    answer: Callable[[Claimant, Any], Awaitable[Answer]]

    def __post_init__(self) -> None:
        self._answering: set[PeerId] = set()
        self._tasks = Tasks(f"answers of {self.protocol}", on_crash=self.peer.link_config.supervisor.ends_conversation)
        config = replace(self.peer.link_config, max_payload_bytes=0)
        self._board = Switchboard(self.peer.network, self.protocol, self.peer.hello, config, accept=self._accept)

    def __repr__(self) -> str:
        return f"<QuestionServer {self._board!r}>"

    async def start(self) -> None:
        """Answer from now on."""
        await self._board.start()

    async def close(self) -> None:
        """End all links."""
        await self._board.close()
        await self._tasks.close()

    def _accept(self, channel: Channel, _frame: Frame, body: Body) -> None:
        if not isinstance(body, self.question):
            channel.close(Error(ErrorCode.MALFORMED))
        elif channel.peer in self._answering:
            channel.close(Error(ErrorCode.BUSY, BUSY_RETRY_S))
        else:
            self._answering.add(channel.peer)
            self._tasks.spawn(self._tell(channel, body), f"answer {channel.peer}")

    async def _tell(self, channel: Channel, question: Body) -> None:
        try:
            answer = await self.answer(channel.claimant, question)
            if isinstance(answer.body, Error | End):
                channel.close(answer.body)
                return
            channel.send(answer.body, payload=answer.payload)
            channel.close()
            await channel.drain()
        except PeerError as error:
            log.debug("%s", error)
        finally:
            self._answering.discard(channel.peer)


async def ask(
    board: Switchboard,
    peer: PeerId,
    question: Body,
    *,
    payload: Sequence[Buffer] = (),
    silence_s: float = SILENCE_S,
) -> AsyncIterator[tuple[Frame, Body]]:
    """The answers to a question, until the peer ends the conversation; each may take `silence_s`.

    Raises PeerLost, PeerRefused, NetworkDown.
    """
    answers: asyncio.Queue[tuple[Frame, Body] | PeerError | None] = asyncio.Queue()

    def hear(frame: Frame, body: Body) -> None:
        if answers.qsize() >= MAX_WAITING:
            raise ProtocolError("a peer sends more than it was asked for", code=ErrorCode.TOO_LARGE, peer=peer)
        if isinstance(body, Error):
            answers.put_nowait(refusal(body.code, retry_s=body.retry_s, peer=peer))
        else:
            answers.put_nowait(None if isinstance(body, End) else (frame, body))

    channel = await board.call(peer, hear, answers.put_nowait)
    silent = PeerLost(f"peer {peer} did not answer for {silence_s:.0f} s", peer=peer)
    try:
        channel.send(question, payload=payload)
        while True:
            # Not wait_for: before Python 3.12 it loses a cancellation that comes together with an answer.
            alarm = asyncio.get_running_loop().call_later(silence_s, answers.put_nowait, silent)
            try:
                item = await answers.get()
            finally:
                alarm.cancel()
            if item is None:
                return
            if isinstance(item, PeerError):
                raise item
            yield item
    finally:
        channel.close()


async def ask_one(
    board: Switchboard,
    peer: PeerId,
    question: Body,
    kind: type[Reply],
    *,
    payload: Sequence[Buffer] = (),
    silence_s: float = SILENCE_S,
) -> tuple[Reply, Buffer]:
    """Return the first answer of this kind, and its payload. Raises ProtocolError if there is none, PeerLost, PeerRefused,
    NetworkDown."""
    async for frame, body in ask(board, peer, question, payload=payload, silence_s=silence_s):
        if isinstance(body, kind):
            return body, frame.payload
    raise ProtocolError("a peer ended a conversation without an answer", peer=peer)
