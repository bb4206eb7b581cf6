"""Beginning anew in the place of a process that cannot compute any more: what it knew of its card is lost until it ends."""

from __future__ import annotations

import os
import sys
import time
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


def begin_anew(reason: ExecutorDied, lived_s: float) -> NoReturn:
    """Run this very command again, in this process, after a pause in which Ctrl-C ends it."""
    before = os.environ.get(COUNT, "0")
    restarts = int(before) if before.isdecimal() and lived_s < LASTED_S else 0
    say(f"error: {reason}. Beginning anew in {pause_s(restarts):.0f} s", err=True)
    time.sleep(pause_s(restarts))
    sys.stdout.flush()
    os.environ[COUNT] = str(restarts + 1)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
