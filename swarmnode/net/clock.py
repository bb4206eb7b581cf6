"""The clocks of a peer in one object: a simulated peer has a clock in virtual time, a real one the machine's."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

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
