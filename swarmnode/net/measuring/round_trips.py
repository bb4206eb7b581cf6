"""Round trips of one link: pings, and how long their answers took.

A ping that queues behind a large payload measures the payload: it gives an upper bound, and counts only where that is below
what is known.
"""

from __future__ import annotations

from collections.abc import Callable

from swarmnode.codec.frames import MAX_SEQ

RISE = 0.2  # how much of a longer round trip counts at once
QUEUE_BYTES = 64 * 1024  # less than this is sent in no time


class RoundTrips:
    """One ping is timed at a time: where others follow it before its answer, the round trip is longer than their period."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.rtt_s: float | None = None  # rises by a moving average
        self._clock = clock
        self._ping = 0
        self._timed_ping = 0  # whose answer is measured; 0 is none
        self._timed_at_s = 0.0
        self._timed_queue_bytes = 0  # sent just before it
        self._queued_bytes = 0  # sent since
        self._behind = 0  # the last ping that left after a large payload; 0 once it was answered

    def __repr__(self) -> str:
        return f"<RoundTrips {'not measured' if self.rtt_s is None else f'{self.rtt_s * 1e3:.1f} ms'}>"

    @property
    def begun(self) -> bool:
        """Whether a ping was ever sent."""
        return self._ping > 0

    @property
    def payload_ahead(self) -> bool:
        """Whether a large payload that was sent before a ping may still be on its way."""
        return self._behind > 0

    def ping(self, *, queued_bytes: int = 0) -> int:
        """The number of a ping that leaves now, after so many bytes since the one before it."""
        self._ping = self._ping % MAX_SEQ + 1
        self._queued_bytes += queued_bytes
        if queued_bytes >= QUEUE_BYTES:
            self._behind = self._ping
        if not self._timed_ping:
            self._timed_ping, self._timed_at_s = self._ping, self._clock()
            self._timed_queue_bytes, self._queued_bytes = self._queued_bytes, 0
        return self._ping

    def pong(self, number: int) -> float | None:
        """An answer has come: the seconds that it took, where it is to the ping that is timed and says how long the way is."""
        if number == self._behind:
            self._behind = 0
        if not self._timed_ping or number != self._timed_ping:
            return None
        self._timed_ping = 0
        sample_s = self._clock() - self._timed_at_s
        rises = self.rtt_s is not None and sample_s > self.rtt_s
        if rises and self._timed_queue_bytes >= QUEUE_BYTES:
            return None
        # It falls at once: what delays a single answer is common, what hastens it is not.
        self.rtt_s = (1 - RISE) * (self.rtt_s or 0.0) + RISE * sample_s if rises else sample_s
        return sample_s
