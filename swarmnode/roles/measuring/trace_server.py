"""Traces for whoever knows a session's trace id: the answering side, and asking every peer of a route."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace

from swarmnode.codec.messages import Error, Hello
from swarmnode.codec.trace_messages import GetTrace, Trace
from swarmnode.errors import ErrorCode, NetworkDown, PeerError
from swarmnode.net.interfaces import Network, PeerId
from swarmnode.net.limits.address_group import Claimant
from swarmnode.net.links.link import LinkConfig
from swarmnode.net.links.switchboard import Switchboard
from swarmnode.roles.measuring.trace_log import SessionTrace
from swarmnode.roles.question_server import Answer, QuestionServer, ask

log = logging.getLogger(__name__)

TRACE_PROTOCOL = "/swarmnode/trace/1"
ANSWER_S = 5.0


def trace_server(
    network: Network, hello: Hello, link_config: LinkConfig, find: Callable[[bytes], SessionTrace | None]
) -> QuestionServer:
    """Answers with what `find` has of a session."""

    async def answer(_asker: Claimant, question: GetTrace) -> Answer:
        known = find(question.trace)
        return Answer(Error(ErrorCode.NO_SESSION) if known is None else known.trace())

    return QuestionServer(network, TRACE_PROTOCOL, hello, link_config, GetTrace, answer)


async def fetch_traces(
    network: Network, peers: Iterable[PeerId], hello: Hello, link_config: LinkConfig, trace: bytes
) -> dict[PeerId, Trace]:
    """What each of the peers has kept of the session with this trace id; without those that know nothing of it or do not answer."""
    board = Switchboard(network, TRACE_PROTOCOL, hello, replace(link_config, max_payload_bytes=0))
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
