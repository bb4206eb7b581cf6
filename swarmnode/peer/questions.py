"""Questions to one peer, and the server that answers them, one at a time for each peer, since an answer is much longer than its
question.

Local peer: the part of this machine's peer that its servers use, and its links for one protocol.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from types import UnionType
from typing import Any, NamedTuple, Protocol, TypeVar

from swarmnode.codec.body import Body
from swarmnode.codec.frames import Frame
from swarmnode.codec.messages import End, Error, Hello
from swarmnode.decisions import DecisionLog
from swarmnode.errors import ErrorCode, PeerError, PeerLost, ProtocolError, refusal
from swarmnode.links.link_config import LinkConfig
from swarmnode.links.switchboard import Channel, Switchboard
from swarmnode.net.addressing.addresses import Claimant
from swarmnode.net.interfaces import Buffer, Network, PeerId
from swarmnode.net.tasks import Tasks
from swarmnode.peer.completed_work import CompletedWork
from swarmnode.peer.paths import ObservedLatency


class LocalPeer(Protocol):
    """The presence that all servers of one process share; `Host` is the real one. Used on the event loop.

    Attributes:
        network: The network of the peer; it outlives every server.
        hello: The greeting at the beginning of each link.
        link_config: Patience, limits, gate and ledger of the links; one object for all servers, since it holds shared state.
        observed_latency: Compute times of other peers, as sessions observe them.
        completed: The work done here for other peers; receipts are checked against it.
        decisions: The log of decisions and the facts behind them.
        weight_of: The share of the device's time that a client deserves, relative to 1 for a stranger. It may be replaced at any
            time: read the attribute at each use.
    """

    network: Network
    hello: Hello
    link_config: LinkConfig
    observed_latency: ObservedLatency
    completed: CompletedWork
    decisions: DecisionLog
    weight_of: Callable[[PeerId], float]

    def sign(self, message: bytes) -> bytes:
        """Sign with the key of this machine's peer id.

        Args:
            message: Bytes that begin with a domain of their own, so that a signature is good for one purpose only.

        Returns:
            The signature, 64 bytes.
        """

    def lost_neighbour(self, error: PeerError) -> None:
        """Note that a link ended by the peer's fault. Returns at once.

        Args:
            error: Why it ended. Its `peer` is left out of routes for now, unless it only refused this peer.
        """


def board_of(
    peer: LocalPeer,
    protocol: str,
    *,
    accept: Callable[[Channel, Frame, Body], None] | None = None,
    on_peer_lost: Callable[[PeerError], None] = lambda _error: None,
) -> Switchboard:
    """Make the links of a peer for one protocol; see `Switchboard`. The caller closes them."""
    links = peer.network, protocol, peer.hello, peer.link_config
    return Switchboard(*links, accept=accept, on_peer_lost=on_peer_lost)


log = logging.getLogger(__name__)

BUSY_RETRY_S = 1.0
SILENCE_S = 30.0  # for one answer: a chunk at 35 KB/s (the link's heartbeat finds a peer that hangs altogether)
MAX_WAITING = 16  # answers received and not taken yet: more than a run of chunks has
Received = TypeVar("Received")
Reply = TypeVar("Reply", bound=Body)


class Answer(NamedTuple):
    """Answer to a question: an Error body if it cannot be answered, an End body if there is nothing to say."""

    body: Body
    payload: Sequence[Buffer] = ()


@dataclass(eq=False)
class QuestionServer:
    """Server for questions of the body type `question`, or of a union of types. `answer` makes the answer from the asking peer and
    its question.

    Questions carry no payload. A peer that asks again before its answer has been sent gets BUSY.
    """

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
        """Start to answer other peers' questions."""
        await self._board.start()

    async def close(self) -> None:
        """Stop answering, and close the links to other peers."""
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
    board: Switchboard, peer: PeerId, question: Body, *, payload: Sequence[Buffer] = (), silence_s: float = SILENCE_S
) -> AsyncIterator[tuple[Frame, Body]]:
    """Yield the answers (frame, body) of `peer` to a question until it ends the conversation.

    Raises PeerLost if the peer is silent for `silence_s` seconds or its link is lost, PeerRefused if it answers with an error code.
    Raises ProtocolError if it breaks the protocol, NetworkDown if there is no network.
    """
    answers: asyncio.Queue[tuple[Frame, Body] | PeerError | None] = asyncio.Queue()

    def receive(frame: Frame, body: Body) -> None:
        if answers.qsize() >= MAX_WAITING:
            raise ProtocolError("it sends more answers than it was asked for", code=ErrorCode.TOO_LARGE, peer=peer)
        if isinstance(body, Error):
            answers.put_nowait(refusal(body.code, retry_s=body.retry_s, peer=peer))
        else:
            answers.put_nowait(None if isinstance(body, End) else (frame, body))

    channel = await board.call(peer, receive, answers.put_nowait)
    try:
        channel.send(question, payload=payload)
        while (answer := await next_answer(answers, peer, silence_s)) is not None:
            yield answer
    finally:
        channel.close()


async def next_answer(
    answers: asyncio.Queue[Received | PeerError], peer: PeerId, silence_s: float = SILENCE_S
) -> Received:
    """Return the next of a peer's answers, or raise the error among them; PeerLost after `silence_s` seconds without either."""
    # Not wait_for: before Python 3.12 it loses a cancellation that comes together with an answer.
    silent = PeerLost(f"peer {peer} did not answer for {silence_s:.0f} s", peer=peer)
    alarm = asyncio.get_running_loop().call_later(silence_s, answers.put_nowait, silent)
    try:
        item = await answers.get()
    finally:
        alarm.cancel()
    if isinstance(item, PeerError):
        raise item
    return item


async def ask_one(
    board: Switchboard,
    peer: PeerId,
    question: Body,
    kind: type[Reply],
    *,
    payload: Sequence[Buffer] = (),
    silence_s: float = SILENCE_S,
) -> tuple[Reply, Buffer]:
    """Return the first answer of the type `kind`, and its payload.

    Raises ProtocolError if the peer ends the conversation without such an answer; PeerLost, PeerRefused, NetworkDown as `ask`.
    """
    async for frame, body in ask(board, peer, question, payload=payload, silence_s=silence_s):
        if isinstance(body, kind):
            return body, frame.payload
    raise ProtocolError("it ended the conversation without an answer", peer=peer)
