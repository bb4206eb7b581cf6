"""Traces of sessions: the steps that a hop remembers, the server that gives them out, and the question to all peers of a route.

Timeline of a session: the parts of the time of each of its tokens, from the traces of the hops of its route.

No two clocks are compared. A token's time is the time at the last hop between the token before and this one; the part not spent at
hops was spent on the way. A link that kept a token longer than usual shows in the difference between the sending time at one hop
and the arrival at the next: the offset of their clocks is the same in all of them, so subtracting their median removes it. If the
client drives the session, its own time counts as time on the way.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

from swarmnode.codec.body import MAX_DRAFTS
from swarmnode.codec.measuring_messages import (
    MAX_BATCH,
    MAX_CAME_US,
    MAX_TRACE_STEPS,
    MAX_TRACE_US,
    TRACE_ID_BYTES,
    DraftCount,
    GetTrace,
    Trace,
    TraceStep,
)
from swarmnode.codec.messages import Error, ProposerKind
from swarmnode.errors import ErrorCode, NetworkDown, PeerError, UsageError
from swarmnode.links.switchboard import Switchboard
from swarmnode.measuring.meters import ACCEPTED, WASTED, by_proposer
from swarmnode.net.addressing.addresses import Claimant
from swarmnode.net.interfaces import PeerId
from swarmnode.peer.questions import Answer, LocalPeer, QuestionServer, ask_one

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

    def record(
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


ROUNDING_US = 3  # rounding error of a sum of three times


class Typical(NamedTuple):
    """Median and largest of some durations or sizes."""

    median: float
    worst: int


@dataclass(frozen=True)
class TimelinePart:
    """Part of a token's time at a peer, of the kind `what` (wait, compute, leave); for the kind `way`, between peers, `peer` is
    empty."""

    what: str
    peer: PeerId
    us: int


@dataclass(frozen=True)
class Late:
    """Link that kept a token longer than usual."""

    source: PeerId
    target: PeerId
    us: int


@dataclass(frozen=True)
class Token:
    """The token drawn for `position`, and the parts of its time. `total_us` is None if no hop measured it."""

    position: int
    total_us: int | None
    parts: tuple[TimelinePart, ...]
    late: Late | None = None

    @property
    def longest(self) -> TimelinePart:
        """The longest part of the time."""
        return max(self.parts, key=lambda part: part.us)

    @property
    def us(self) -> int:
        """Microseconds that the token took; if unmeasured, the sum of its parts at hops."""
        return sum(part.us for part in self.parts) if self.total_us is None else self.total_us


class Stop:
    """Hop of the timeline: a peer, its units, and its decode steps.

    `decoded` has the last step by each position after one that was decoded: steps of one position, and steps with guesses.
    `wait_us`, `compute_us` and `batch` are the typical figures of those steps, zeros if there are none.
    """

    def __init__(self, peer: PeerId, trace: Trace) -> None:
        self.peer = peer
        self.span = (trace.start, trace.end)
        self.steps = trace.steps
        steps = [step for step in trace.steps if step.count == 1 or step.guessed]
        self.decoded = {end: step for step in steps for end in range(step.end - step.count + 1, step.end + 1)}
        self._by_end = {**{step.end: step for step in trace.steps}, **self.decoded}
        self.guessed = sum(step.guessed for step in steps)  # positions
        self.wasted = sum(step.count for step in steps) - len(self.decoded)  # positions that were computed again
        self.wait_us, self.compute_us, self.batch = map(self._typical, ("wait_us", "compute_us", "batch"))
        self.drafts = Counter(
            {
                (ProposerKind.numbered(one.proposer).label, result): count
                for one in trace.drafts
                for result, count in ((ACCEPTED, one.accepted), (WASTED, one.wasted))
            }
        )

    def _typical(self, field: str) -> Typical:
        figures = [getattr(step, field) for step in self.decoded.values()] or [0]
        return Typical(median(figures), max(figures))

    def since_last(self, position: int) -> int | None:
        """Return the microseconds between the sending of the position before and of this one.

        None if one of them is unknown, or in a replay, where steps arrive before the steps that they follow are done.
        """
        before, now = self._by_end.get(position - 1), self.decoded.get(position)
        if before is None or now is None:
            return None
        if (
            not (before.guessed or now.guessed)
            and now.came_us + ROUNDING_US < before.came_us + before.wait_us + before.compute_us
        ):
            return None
        return max(0, sent_us(now) - sent_us(before))

    def until_next(self, position: int) -> int | None:
        """Return the microseconds between the arrival of this position and of the next; None if one of them is unknown."""
        now, after = self.decoded.get(position), self.decoded.get(position + 1)
        return None if now is None or after is None else max(0, after.came_us - now.came_us)


def sent_us(step: TraceStep) -> int:
    """Return when a step left, on its hop's clock."""
    return step.came_us + step.stay_us


def parse_trace_id(text: str) -> bytes:
    """Return the bytes of a trace id in hex. Raises UsageError if `text` is none."""
    try:
        trace = bytes.fromhex(text)
    except ValueError:
        trace = b""
    if len(trace) != TRACE_ID_BYTES:
        raise UsageError(f"a trace id is {2 * TRACE_ID_BYTES} hex digits, not {text!r}")
    return trace


class Timeline:
    """Tokens of one session with the parts of their time, from the traces of the peers that remember it; none without traces."""

    def __init__(self, traces: Mapping[PeerId, Trace]) -> None:
        self.stops = sorted((Stop(peer, trace) for peer, trace in traces.items()), key=lambda stop: stop.span)
        self._first = min((stop.span[0] for stop in self.stops), default=0)  # unit
        self._last = max((stop.span[1] for stop in self.stops), default=0)  # the one after the last unit

    @property
    def drafts(self) -> Counter[tuple[str, str]]:
        """Guesses of all first hops that the session had, by proposer and result."""
        return sum((stop.drafts for stop in self.stops), Counter())

    def slowest(self, count: int) -> list[Token]:
        """Return the `count` tokens that took longest, the slowest first."""
        return sorted(self.tokens(), key=lambda token: -token.us)[:count]

    def tokens(self) -> list[Token]:
        """Return all tokens whose steps are remembered, in order. The prompt, whose steps have many positions, is left out."""
        late, tokens = self._late(), []
        for position in sorted({position for stop in self.stops for position in stop.decoded}):
            # Of two hops with the same units, one counts.
            hops = {stop.span: stop for stop in self.stops if position in stop.decoded}
            parts = [part for stop in hops.values() for part in timeline_parts(stop.peer, stop.decoded[position])]
            # The last hop knows the token's time, else the first, if the last has changed and had to catch up.
            at_last = (stop.since_last(position) for stop in self.stops if stop.span[1] == self._last)
            at_first = (stop.until_next(position) for stop in self.stops if stop.span[0] == self._first)
            total_us = next((us for us in (*at_last, *at_first) if us is not None), None)
            if total_us is not None:
                parts.append(TimelinePart("way", "", max(0, total_us - sum(part.us for part in parts))))
            tokens.append(Token(position, total_us, tuple(parts), late.get(position)))
        return tokens

    def _late(self) -> dict[int, Late]:
        """Return for each position the link that delayed it most beyond the link's median."""
        latest: dict[int, Late] = {}
        # Links (from, to, lag in positions): from each hop to the next, and in a ring from the last to the first with lag 1
        pairs = [(source, target) for source in self.stops for target in self.stops if source is not target]
        links = [(source, target, 0) for source, target in pairs if source.span[1] == target.span[0]]
        around = (self._last, self._first)
        links += [(source, target, 1) for source, target in pairs if (source.span[1], target.span[0]) == around]
        for source, target, lag in links:
            delays = {
                position: target.decoded[position].came_us - sent_us(source.decoded[position - lag])
                for position, step in target.decoded.items()
                if position - lag in source.decoded and not (lag and step.guessed)  # a guess comes before the token
            }
            usual_us = median(delays.values()) if delays else 0
            for position, delay_us in delays.items():
                late_us = round(delay_us - usual_us)
                if late_us > 0 and (position not in latest or late_us > latest[position].us):
                    latest[position] = Late(source.peer, target.peer, late_us)
        return latest


def timeline_parts(peer: PeerId, step: TraceStep) -> tuple[TimelinePart, ...]:
    """Return the parts of a step's time at a hop. `leave` is the time between computing and sending, when the hop had other
    work."""
    left_us = max(0, step.stay_us - step.wait_us - step.compute_us)
    return (
        TimelinePart("wait", peer, step.wait_us),
        TimelinePart("compute", peer, step.compute_us),
        TimelinePart("leave", peer, left_us),
    )
