"""Beginning anew in the place of a process that cannot compute any more: what it knew of its card is lost until it ends."""

from __future__ import annotations

import contextlib
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
