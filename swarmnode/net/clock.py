"""The clocks of a peer in one object: a simulated peer has a clock in virtual time, a real one the machine's."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Clock:
    """Clocks and sleep of a peer, in seconds.

    `monotonic` measures intervals, `stopwatch` round trips, `compute` passes over a device. `hold_up` lets compute time pass, off
    the event loop. `unix` is only for times that other peers, or a later run of this one, read.
    """

    unix: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic
    stopwatch: Callable[[], float] = time.perf_counter
    compute: Callable[[], float] = time.perf_counter
    hold_up: Callable[[float], None] = time.sleep


MACHINE_CLOCK = Clock()
