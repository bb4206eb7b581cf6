"""Process of a command: the garbage collector, paused during the start, and the restart of the command in its own process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sys
import time
from collections.abc import Iterator
from typing import NoReturn

from swarmnode.errors import ExecutorDied
from swarmnode.terminal.console import say

COUNT = "SWARMNODE_RESTARTS"  # environment variable for the restarted command: number of restarts in a row
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 300.0
LASTED_S = 600.0  # a run that lasted longer starts a new row
LONGEST_S = 60.0


class CollectorPause:
    """Pause of garbage collection, from construction to `end`, to the end of the context, or until a minute has passed on
    the running loop.

    Imports create no garbage, yet the collector scans everything again and again, which takes a quarter of a start's CPU time.
    Objects that exist at the end stay out of all later collections, which are therefore shorter.
    """

    def __init__(self) -> None:
        self._paused = True
        gc.disable()
        asyncio.get_running_loop().call_later(LONGEST_S, self.end)

    def __enter__(self) -> CollectorPause:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Resume garbage collection. Safe to call twice."""
        if self._paused:
            self._paused = False
            gc.freeze()
            gc.enable()


def pause_s(restarts: int) -> float:
    """Return the seconds to wait before a restart. They double with each restart, so that a broken GPU keeps neither its machine
    nor its neighbours busy."""
    return float(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(restarts, 16)))


def is_begun_anew() -> bool:
    """Return whether this process has restarted the command, which therefore has begun its work before."""
    return COUNT in os.environ


@contextlib.contextmanager
def beginning_anew() -> Iterator[None]:
    """Restart the command if the context raises ExecutorDied."""
    began_s = time.monotonic()
    try:
        yield
    except ExecutorDied as error:
        begin_anew(error, time.monotonic() - began_s)


def begin_anew(reason: ExecutorDied, lived_s: float) -> NoReturn:
    """Print the reason, wait (Ctrl-C ends the command), and run the command again in this process."""
    before = os.environ.get(COUNT, "0")
    restarts = int(before) if before.isdecimal() and lived_s < LASTED_S else 0
    say(f"error: {reason}. Starting again in {pause_s(restarts):.0f} s", err=True)
    time.sleep(pause_s(restarts))
    sys.stdout.flush()
    os.environ[COUNT] = str(restarts + 1)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
