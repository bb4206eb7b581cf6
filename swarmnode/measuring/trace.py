"""Traces of sessions: the steps that a hop remembers, the server that gives them out, and the question to all peers of a route."""

from __future__ import annotations

import asyncio
import logging
import struct
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

from swarmnode.codec.body import MAX_DRAFTS
from swarmnode.codec.measuring_messages import (
    MAX_BATCH,
    MAX_CAME_US,
    MAX_TRACE_STEPS,
    MAX_TRACE_US,
    DraftCount,
    GetTrace,
    Trace,
    TraceStep,
)
from swarmnode.codec.messages import Error, ProposerKind
from swarmnode.errors import ErrorCode, NetworkDown, PeerError
from swarmnode.measuring.meters import ACCEPTED, WASTED, by_proposer
from swarmnode.net.interfaces import PeerId
from swarmnode.net.limits.address_group import Claimant
from swarmnode.net.limits.fair_share import Recent
from swarmnode.net.links.switchboard import Switchboard
from swarmnode.peer.local_peer import LocalPeer
from swarmnode.peer.questions import Answer, QuestionServer, ask_one

log = logging.getLogger(__name__)

TRACE_PROTOCOL = "/swarmnode/trace/1"
ANSWER_S = 5.0
SESSIONS = 64  # ended sessions remembered
STEP = struct.Struct("<IIQIIIHB")  # fields of TraceStep


class SessionTrace:
    """Last steps of one session here, in units [start, end)."""

    def __init__(self, start: int, end: int, *, max_steps: int = MAX_TRACE_STEPS) -> None:
        self._units = (start, end)
        self._max_steps = max_steps
        self._first_came_s: float | None = None
        self._steps = 0  # number of steps noted; the last `max_steps` of them are kept
        self._table = bytearray()
        self.drafts: Counter[tuple[str, str]] = Counter()  # guesses made here, by proposer and result

    def __repr__(self) -> str:
        start, end = self._units
        return f"<SessionTrace of units {start}:{end}, {self._steps} steps>"

    def note(
        self,
        end: int,
        count: int,
        *,
        came_s: float,
        began_s: float,
        ended_s: float,
        sent_s: float,
        batch: int,
        guessed: int = 0,
    ) -> None:
        """Record that positions [end - count, end) have left, the last `guessed` of them guesses; the four times are of one
        clock."""
        if self._first_came_s is None:
            self._first_came_s = came_s
        if len(self._table) < self._max_steps * STEP.size:
            self._table.extend(bytes(STEP.size))
        STEP.pack_into(
            self._table,
            self._steps % self._max_steps * STEP.size,
            end,
            count,
            min(round((came_s - self._first_came_s) * 1e6), MAX_CAME_US),
            _us(began_s - came_s),
            _us(ended_s - began_s),
            _us(sent_s - came_s),
            min(batch, MAX_BATCH),
            min(guessed, MAX_DRAFTS),
        )
        self._steps += 1

    def trace(self) -> Trace:
        """Return the steps as a TRACE body."""
        steps = [TraceStep(*fields) for fields in STEP.iter_unpack(self._table)]
        oldest = self._steps % self._max_steps if self._steps > self._max_steps else 0
        counts = by_proposer(self.drafts).items()
        drafts = tuple(DraftCount(ProposerKind.named(name), count[ACCEPTED], count[WASTED]) for name, count in counts)
        return Trace(*self._units, (*steps[oldest:], *steps[:oldest]), drafts)


def _us(seconds: float) -> int:
    return max(0, min(round(seconds * 1e6), MAX_TRACE_US))


class TraceLog:
    """Traces of the sessions that ended last at this hop, by their trace ids."""

    def __init__(self, *, max_sessions: int = SESSIONS) -> None:
        self._traces: Recent[bytes, SessionTrace] = Recent(max_sessions)

    def __repr__(self) -> str:
        return f"<TraceLog of {len(self._traces)} sessions>"

    def keep(self, trace_id: bytes, trace: SessionTrace) -> None:
        """Keep the trace of an ended session; the one kept longest ago gives way."""
        self._traces[trace_id] = trace

    def get(self, trace_id: bytes) -> SessionTrace | None:
        """Return the trace of a session; None if it is unknown or forgotten."""
        return self._traces.get(trace_id)


def trace_server(peer: LocalPeer, find: Callable[[bytes], SessionTrace | None]) -> QuestionServer:
    """Return a server that answers with the trace that `find` returns for a trace id, or with ERROR NO_SESSION if that is None."""

    async def answer(_asker: Claimant, question: GetTrace) -> Answer:
        known = find(question.trace)
        return Answer(Error(ErrorCode.NO_SESSION) if known is None else known.trace())

    return QuestionServer(peer, TRACE_PROTOCOL, GetTrace, answer)


async def fetch_traces(own: LocalPeer, peers: Iterable[PeerId], trace: bytes) -> dict[PeerId, Trace]:
    """Return the traces of the session with this trace id from the peers; peers that do not know it or do not answer are left
    out."""
    board = Switchboard(own.network, TRACE_PROTOCOL, own.hello, replace(own.link_config, max_payload_bytes=0))
    peers = list(peers)
    try:
        answers = await asyncio.gather(*(_fetch(board, peer, trace) for peer in peers))
    finally:
        await board.close()
    return {peer: answer for peer, answer in zip(peers, answers, strict=True) if answer is not None}


async def _fetch(board: Switchboard, peer: PeerId, trace: bytes) -> Trace | None:
    try:
        answer, _ = await asyncio.wait_for(ask_one(board, peer, GetTrace(trace), Trace), ANSWER_S)
    except (PeerError, NetworkDown, asyncio.TimeoutError) as error:
        log.info("no trace from peer %s: %s", peer, error or "no answer")
        return None
    return answer
