"""Round trips of one link: pings, and how long their answers took."""

from __future__ import annotations

from collections.abc import Callable

from swarmnode.codec.frames import MAX_SEQ

RISE = 0.2  # how much of a longer round trip counts at once


class RoundTrips:
    """One ping is timed at a time: where others follow it before its answer, the round trip is longer than their period."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.rtt_s: float | None = None  # rises by a moving average
        self._clock = clock
        self._ping = 0
        self._timed_ping = 0  # whose answer is measured; 0 is none
        self._timed_at_s = 0.0

    def __repr__(self) -> str:
        return f"<RoundTrips {'not measured' if self.rtt_s is None else f'{self.rtt_s * 1e3:.1f} ms'}>"

    @property
    def begun(self) -> bool:
        """Whether a ping was ever sent."""
        return self._ping > 0

    def ping(self) -> int:
        """The number of a ping that leaves now."""
        self._ping = self._ping % MAX_SEQ + 1
        if not self._timed_ping:
            self._timed_ping, self._timed_at_s = self._ping, self._clock()
        return self._ping

    def pong(self, number: int) -> float | None:
        """An answer has come: the seconds that it took, where it is to the ping that is timed."""
        if not self._timed_ping or number != self._timed_ping:
            return None
        self._timed_ping = 0
        sample_s = self._clock() - self._timed_at_s
        # It falls at once: a ping that queued behind a long payload says little about the next one.
        rises = self.rtt_s is not None and sample_s > self.rtt_s
        self.rtt_s = (1 - RISE) * (self.rtt_s or 0.0) + RISE * sample_s if rises else sample_s
        return sample_s
