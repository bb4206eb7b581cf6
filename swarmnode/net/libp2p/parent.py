"""No process outlives the one that started it, however that one dies."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

# Looked up before there is a fork: between fork and exec nothing may be loaded or locked.
_prctl = ctypes.CDLL(None).prctl if sys.platform.startswith("linux") else None


def die_with_parent() -> None:
    """For `preexec_fn`: ask the kernel to kill this process when the thread that forked it ends (Linux; elsewhere no-op)."""
    if _prctl is None or sys.platform == "win32":
        return
    parent = os.getppid()
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died between the fork and the call
        os.kill(os.getpid(), signal.SIGKILL)
