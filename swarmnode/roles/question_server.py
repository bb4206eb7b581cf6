"""Answers the questions of a protocol of its own: to each peer one at a time, since an answer is so much longer."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from types import UnionType
from typing import Any, NamedTuple

from swarmnode.codec.frames import Frame
from swarmnode.codec.messages import Body, End, Error, Hello
from swarmnode.errors import ErrorCode, PeerError
from swarmnode.net.interfaces import Buffer, Network, PeerId
from swarmnode.net.limits.address_group import Claimant
from swarmnode.net.links.link import LinkConfig
from swarmnode.net.links.switchboard import Channel, Switchboard
from swarmnode.net.tasks import Tasks

log = logging.getLogger(__name__)

BUSY_RETRY_S = 1.0


class Answer(NamedTuple):
    """What a question is answered with: an ERROR where it cannot be, END where there is nothing to say."""

    body: Body
    payload: Sequence[Buffer] = ()


class QuestionServer:
    """Answers questions of the type `question` (or of several) with what `answer` makes of (who asks, question). They carry no
    payload."""

    def __init__(
        self,
        network: Network,
        protocol: str,
        hello: Hello,
        link_config: LinkConfig,
        question: type[Body] | UnionType,
        answer: Callable[[Claimant, Any], Awaitable[Answer]],
    ) -> None:
        self._question = question
        self._answer = answer
        self._answering: set[PeerId] = set()
        self._tasks = Tasks(f"answers of {protocol}", on_crash=link_config.supervisor.ends_conversation)
        config = replace(link_config, max_payload_bytes=0)
        self._board = Switchboard(network, protocol, hello, config, accept=self._accept)

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
        if not isinstance(body, self._question):
            channel.close(Error(ErrorCode.MALFORMED))
        elif channel.peer in self._answering:
            channel.close(Error(ErrorCode.BUSY, BUSY_RETRY_S))
        else:
            self._answering.add(channel.peer)
            self._tasks.spawn(self._tell(channel, body), f"answer {channel.peer}")

    async def _tell(self, channel: Channel, question: Body) -> None:
        try:
            answer = await self._answer(channel.claimant, question)
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
