"""The clocks of a peer, as one argument: a peer in virtual time has others than one on a machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Clock:
    """All in seconds. Intervals are measured by `monotonic`, round trips by `stopwatch`, passes over a device by `compute`, which
    `hold_up` lets pass off the loop; only what other peers read, or a later run of this one, is told in unix time."""

    unix: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic
    stopwatch: Callable[[], float] = time.perf_counter
    compute: Callable[[], float] = time.perf_counter
    hold_up: Callable[[float], None] = time.sleep


MACHINE_CLOCK = Clock()
