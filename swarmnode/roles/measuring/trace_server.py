"""Traces for whoever knows a session's trace id: the answering side, and asking every peer of a route."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace

from swarmnode.codec.frames import Frame
from swarmnode.codec.messages import Body, Error, Hello
from swarmnode.codec.trace_messages import GetTrace, Trace
from swarmnode.errors import ErrorCode, NetworkDown, PeerError
from swarmnode.net.interfaces import Network, PeerId
from swarmnode.net.links.link import LinkConfig
from swarmnode.net.links.switchboard import Channel, Switchboard
from swarmnode.net.tasks import Tasks
from swarmnode.roles.fetching.sources import ask
from swarmnode.roles.measuring.trace_log import SessionTrace

log = logging.getLogger(__name__)

TRACE_PROTOCOL = "/swarmnode/trace/1"
ANSWER_S = 5.0
BUSY_RETRY_S = 1.0


class TraceServer:
    """Answers with what `find` has of a session: to each peer one question at a time, since an answer is so much longer."""

    def __init__(
        self, network: Network, hello: Hello, link_config: LinkConfig, find: Callable[[bytes], SessionTrace | None]
    ) -> None:
        self._find = find
        self._answering: set[PeerId] = set()
        self._tasks = Tasks("trace answers", on_crash=link_config.supervisor.ends_conversation)
        self._board = Switchboard(network, TRACE_PROTOCOL, hello, _lean(link_config), accept=self._accept)

    def __repr__(self) -> str:
        return f"<TraceServer {self._board!r}>"

    async def start(self) -> None:
        """Answer from now on."""
        await self._board.start()

    async def close(self) -> None:
        """End all links."""
        await self._board.close()
        await self._tasks.close()

    def _accept(self, channel: Channel, _frame: Frame, body: Body) -> None:
        if not isinstance(body, GetTrace):
            channel.close(Error(ErrorCode.MALFORMED))
            return
        known = self._find(body.trace)
        if known is None:
            channel.close(Error(ErrorCode.NO_SESSION))
        elif channel.peer in self._answering:
            channel.close(Error(ErrorCode.BUSY, BUSY_RETRY_S))
        else:
            self._answering.add(channel.peer)
            self._tasks.spawn(self._answer(channel, known), f"answer {channel.peer}")

    async def _answer(self, channel: Channel, known: SessionTrace) -> None:
        try:
            channel.send(known.trace())
            channel.close()
            await channel.drain()
        except PeerError as error:
            log.debug("%s", error)
        finally:
            self._answering.discard(channel.peer)


async def fetch_traces(
    network: Network, peers: Iterable[PeerId], hello: Hello, link_config: LinkConfig, trace: bytes
) -> dict[PeerId, Trace]:
    """What each of the peers has kept of the session with this trace id; without those that know nothing of it or do not answer."""
    board = Switchboard(network, TRACE_PROTOCOL, hello, _lean(link_config))
    peers = list(peers)
    try:
        answers = await asyncio.gather(*(_fetch(board, peer, trace) for peer in peers))
    finally:
        await board.close()
    return {peer: answer for peer, answer in zip(peers, answers, strict=True) if answer is not None}


async def _fetch(board: Switchboard, peer: PeerId, trace: bytes) -> Trace | None:
    try:
        return await asyncio.wait_for(_ask(board, peer, trace), ANSWER_S)
    except (PeerError, NetworkDown, asyncio.TimeoutError) as error:
        log.info("no trace from peer %s: %s", peer, error or "no answer")
        return None


async def _ask(board: Switchboard, peer: PeerId, trace: bytes) -> Trace | None:
    async for _frame, body in ask(board, peer, GetTrace(trace)):
        if isinstance(body, Trace):
            return body
    return None


def _lean(config: LinkConfig) -> LinkConfig:
    """Neither questions nor answers carry a payload."""
    return replace(config, max_payload_bytes=0)
