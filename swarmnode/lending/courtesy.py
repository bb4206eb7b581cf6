"""Letting other programs go first, by what the system has for it."""

from __future__ import annotations

import logging
import os
import sys

import psutil

log = logging.getLogger(__name__)


def yield_cpu(nice: int) -> None:
    """Compute after others, by 0 to 19 steps."""
    if sys.platform != "win32":
        os.nice(nice)


def yield_disk() -> None:
    """Read and write when nobody else does (the idle class of Linux), this process and those that it starts from now on."""
    if sys.platform == "linux":
        psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)
    else:
        log.warning("--idle-disk: only Linux has priorities for disks")
