"""No process outlives the one that started it, however that one dies."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """For `preexec_fn`: ask the kernel to kill this process when the thread that forked it ends (Linux; elsewhere no-op)."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died between the fork and the call
        os.kill(os.getpid(), signal.SIGKILL)
