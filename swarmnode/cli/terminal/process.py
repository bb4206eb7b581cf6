"""The process of a command: its garbage collector, held back while it starts, and beginning anew in its own place."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sys
import time
from collections.abc import Iterator
from typing import NoReturn

from swarmnode.cli.terminal.console import say
from swarmnode.errors import ExecutorDied

COUNT = "SWARMNODE_RESTARTS"  # how often in a row, in the environment of the next one
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 300.0
LASTED_S = 600.0  # who lived for so long is not in a row with what came before
LONGEST_S = 60.0


class CollectorPause:
    """No collections from now until `end`, at the latest when it is left, or when a minute has gone by on the running loop.

    While modules are imported nothing becomes garbage, yet the collector looks through everything again and again: a quarter of the
    CPU that a start takes. What is there at the end stays out of all later collections, too, which are shorter for it.
    """

    def __init__(self) -> None:
        self._paused = True
        gc.disable()
        asyncio.get_running_loop().call_later(LONGEST_S, self.end)

    def __repr__(self) -> str:
        return f"<CollectorPause {'on' if self._paused else 'over'}>"

    def __enter__(self) -> CollectorPause:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Collect as usual. Safe to call twice."""
        if self._paused:
            self._paused = False
            gc.freeze()
            gc.enable()


def pause_s(restarts: int) -> float:
    """Twice as long each time: a card that is broken is not to keep its machine busy, nor its neighbours."""
    return float(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(restarts, 16)))


def is_begun_anew() -> bool:
    """Whether this command was run before by this process, and has begun what it is asked for."""
    return COUNT in os.environ


@contextlib.contextmanager
def beginning_anew() -> Iterator[None]:
    """Where nothing can be computed any more in the context, the command begins anew."""
    began_s = time.monotonic()
    try:
        yield
    except ExecutorDied as error:
        begin_anew(error, time.monotonic() - began_s)


def begin_anew(reason: ExecutorDied, lived_s: float) -> NoReturn:
    """Run this very command again, in this process, after a pause in which Ctrl-C ends it."""
    before = os.environ.get(COUNT, "0")
    restarts = int(before) if before.isdecimal() and lived_s < LASTED_S else 0
    say(f"error: {reason}. Beginning anew in {pause_s(restarts):.0f} s", err=True)
    time.sleep(pause_s(restarts))
    sys.stdout.flush()
    os.environ[COUNT] = str(restarts + 1)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
