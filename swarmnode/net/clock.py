"""The clocks of a peer in one object, a simulated one in virtual time; waiting times for answers, from measurements of link and
peer; and back-off times after failures. The caller of the waiting times brings the measurements, and acts when the time is over."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from swarmnode import tolerances
from swarmnode.net.fair_share import Recent
from swarmnode.net.interfaces import PeerId

SLEWED_S = 5.0  # a smaller step of the machine's clock is followed at once


def machine_uptime() -> float:
    """Return seconds that also pass while the machine sleeps, from an arbitrary start. No change of the clock moves them."""
    names = {"linux": "CLOCK_BOOTTIME", "darwin": "CLOCK_MONOTONIC_RAW"}
    source = getattr(time, names.get(sys.platform, ""), None)
    return time.monotonic() if source is None else time.clock_gettime(source)


class SteadyTime:
    """Unix time that goes on evenly when the machine's clock jumps. It adopts the clock's new time when `follow` is called."""

    def __init__(self, wall: Callable[[], float], uptime: Callable[[], float]) -> None:
        self._wall = wall
        self._uptime = uptime
        self._offset_s = wall() - uptime()

    def __call__(self) -> float:
        """Return the unix time in seconds."""
        uptime_s, wall = self._uptime(), self._wall()
        if abs(wall - uptime_s - self._offset_s) <= SLEWED_S:
            self._offset_s = wall - uptime_s
        return uptime_s + self._offset_s

    @property
    def jumped_s(self) -> float:
        """Seconds that the machine's clock is ahead of this time; negative if it was set back, 0 without a jump."""
        ahead_s = self._wall() - self._uptime() - self._offset_s
        return ahead_s if abs(ahead_s) > SLEWED_S else 0.0

    def follow(self) -> None:
        """Adopt the time of the machine's clock."""
        self._offset_s = self._wall() - self._uptime()


@dataclass(frozen=True)
class Clock:
    """Clocks and sleep of a peer, in seconds.

    `monotonic` measures intervals, `stopwatch` round trips, `compute` passes over a device. `hold_up` lets compute time pass, off
    the event loop. `unix` is only for times that other peers, or a later run of this one, read. `uptime` also passes while the
    machine sleeps; None: `monotonic` does.
    """

    unix: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic
    stopwatch: Callable[[], float] = time.perf_counter
    compute: Callable[[], float] = time.perf_counter
    hold_up: Callable[[float], None] = time.sleep
    uptime: Callable[[], float] | None = None

    def steady_time(self) -> SteadyTime:
        """Return the unix time of a peer, which a jump of the machine's clock does not move."""
        return SteadyTime(self.unix, self.uptime or self.monotonic)


MACHINE_CLOCK = Clock(uptime=machine_uptime)


MOST_PAUSES = 8192  # peers whose failures are remembered at once


@dataclass(frozen=True)
class Deadline:
    """A rule for waiting: `slack` times the expected duration of the answer, at least `floor_s`, at most `ceiling_s` (seconds).

    The floor covers delays that no measurement foretells (a pause of the garbage collector, a busy machine). The ceiling is used
    without measurements, and bounds a peer's gain from being slow. Raises ValueError if the values contradict one another.
    """

    floor_s: float = 1.0
    ceiling_s: float = 60.0
    slack: float = 4.0

    def __post_init__(self) -> None:
        if not (0 < self.floor_s <= self.ceiling_s and self.slack >= 1):
            raise ValueError(f"a deadline needs 0 < floor <= ceiling and a slack of at least 1: {self!r}")

    def wait_s(
        self, *, rtt_s: float | None, work_s: float | None = 0.0, size_bytes: int = 0, bytes_per_s: float | None = None
    ) -> float:
        """Return the seconds to wait for an answer.

        Args:
            rtt_s: Measured round trip; None if unmeasured.
            work_s: Computing time of the question and of all that waits before it; None if unmeasured.
            size_bytes: Bytes to transfer, there and back together.
            bytes_per_s: Measured bandwidth; None if unmeasured.

        Returns:
            `slack` times the sum of round trip, transfer and work, between floor and ceiling. The ceiling if a measurement is
                missing
            (a missing bandwidth counts only if there are bytes to transfer).
        """
        if rtt_s is None or work_s is None or (size_bytes and not bytes_per_s):
            return self.ceiling_s
        transfer_s = size_bytes / bytes_per_s if bytes_per_s else 0.0
        return min(self.ceiling_s, max(self.floor_s, self.slack * (rtt_s + transfer_s + work_s)))


class Expectation:
    """Expected duration of a kind of work, learnt from samples: a mean and a mean deviation, as TCP does for round trips (RFC
    6298).

    The samples may have any unit: seconds, or seconds per position.
    """

    MEAN_GAIN = 1 / 8
    DEVIATION_GAIN = 1 / 4
    DEVIATIONS = 4

    def __init__(self) -> None:
        self.mean: float | None = None  # smoothed, of the samples; None before the first
        self._deviation = 0.0

    def record(self, sample: float) -> None:
        """Update the moving mean and deviation by one more `sample`."""
        if self.mean is None:
            self.mean, self._deviation = sample, sample / 2
            return
        self._deviation += self.DEVIATION_GAIN * (abs(sample - self.mean) - self._deviation)
        self.mean += self.MEAN_GAIN * (sample - self.mean)

    @property
    def bound(self) -> float | None:
        """Mean plus DEVIATIONS mean deviations; None before the first sample."""
        return None if self.mean is None else self.mean + self.DEVIATIONS * self._deviation


class Backoff:
    """Exponential back-off by peer: a pause that grows with each failure in a row; a success resets it.

    A peer also starts anew if its last pause ended more than `forget_s` seconds ago, or if `most` other peers failed since.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        first_s: float = tolerances.FIRST_PAUSE_S,
        factor: float = 2.0,
        ceiling_s: float = tolerances.MAX_PAUSE_S,
        forget_s: float = tolerances.FORGOTTEN_S,
        most: int = MOST_PAUSES,
    ) -> None:
        self._clock = clock
        self._first_s = first_s
        self._factor = factor
        self._ceiling_s = ceiling_s
        self._forget_s = forget_s
        self._pauses: Recent[PeerId, tuple[float, float]] = Recent(most)  # the last pause, and until when it lasts

    def __repr__(self) -> str:
        return f"<Backoff from {len(self.resting)} of {len(self._pauses)} peers>"

    def failed(self, peer: PeerId, *, at_least_s: float = 0.0) -> float:
        """Record a failure of `peer` and return the seconds of its pause, at least `at_least_s` (the time in a BUSY answer,
        say)."""
        now_s = self._clock()
        last_s, until_s = self._pauses.get(peer, (0.0, 0.0))
        is_new = peer not in self._pauses or until_s <= now_s - self._forget_s
        pause_s = self._first_s if is_new else min(self._ceiling_s, last_s * self._factor)
        self._pauses[peer] = (pause_s, now_s + max(pause_s, at_least_s))
        return max(pause_s, at_least_s)

    def succeeded(self, peer: PeerId) -> None:
        """Forget the failures of `peer`, so that it is used again without a pause."""
        self._pauses.pop(peer, None)

    def pause_s(self, peer: PeerId) -> float:
        """Return the remaining seconds of the pause of `peer`; 0 if it may be asked."""
        _, until_s = self._pauses.get(peer, (0.0, 0.0))
        return max(0.0, until_s - self._clock())

    @property
    def resting(self) -> frozenset[PeerId]:
        """Peers that are not used now, because they failed lately."""
        now_s = self._clock()
        return frozenset(peer for peer, (_, until_s) in self._pauses.items() if until_s > now_s)
