"""Letting other programs go first, by what the system has for it."""

from __future__ import annotations

import logging

import psutil

log = logging.getLogger(__name__)


def yield_disk() -> None:
    """Read and write when nobody else does (the idle class of Linux), this process and those that it starts from now on."""
    idle_class = getattr(psutil, "IOPRIO_CLASS_IDLE", None)
    if idle_class is None:
        log.warning("this system has no priorities for disks")
        return
    psutil.Process().ionice(idle_class)
