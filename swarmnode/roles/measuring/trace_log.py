"""What a hop remembers of a session: for each of its last steps, how long it waited, took, and stayed.

Bounded: of a session the last 512 steps, of some 30 bytes each, and of those that are over the last 64: 1 MB. A step is packed as
it comes, in some two microseconds. Everything is a duration on this machine's own clock.
"""

from __future__ import annotations

import struct

from swarmnode.codec.trace_messages import MAX_BATCH, MAX_CAME_US, MAX_TRACE_STEPS, MAX_TRACE_US, Trace, TraceStep
from swarmnode.net.limits.recent import Recent

SESSIONS = 64
STEP = struct.Struct("<IIQIIIH")  # as TraceStep's fields


class SessionTrace:
    """The last steps of one session here, in units [start, end)."""

    def __init__(self, start: int, end: int, *, max_steps: int = MAX_TRACE_STEPS) -> None:
        self._units = (start, end)
        self._max_steps = max_steps
        self._first_came_s: float | None = None
        self._steps = 0  # that were noted; the last `max_steps` of them are here
        self._table = bytearray()

    def __repr__(self) -> str:
        start, end = self._units
        return f"<SessionTrace of units {start}:{end}, {self._steps} steps>"

    def note(
        self, end: int, count: int, *, came_s: float, began_s: float, ended_s: float, sent_s: float, batch: int
    ) -> None:
        """Positions [end - count, end) have left; the four times are of one clock."""
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
        )
        self._steps += 1

    def trace(self) -> Trace:
        """As it travels."""
        steps = [TraceStep(*fields) for fields in STEP.iter_unpack(self._table)]
        oldest = self._steps % self._max_steps if self._steps > self._max_steps else 0
        return Trace(*self._units, (*steps[oldest:], *steps[:oldest]))


def _us(seconds: float) -> int:
    return max(0, min(round(seconds * 1e6), MAX_TRACE_US))


class TraceLog:
    """The traces of the sessions that ended last at this hop, by their trace ids."""

    def __init__(self, *, max_sessions: int = SESSIONS) -> None:
        self._traces: Recent[bytes, SessionTrace] = Recent(max_sessions)

    def __repr__(self) -> str:
        return f"<TraceLog of {len(self._traces)} sessions>"

    def keep(self, trace_id: bytes, trace: SessionTrace) -> None:
        """A session has ended; the one that ended first may be forgotten for it."""
        self._traces[trace_id] = trace

    def get(self, trace_id: bytes) -> SessionTrace | None:
        """None where nothing is known of the session, or not any more."""
        return self._traces.get(trace_id)
