"""A child process that ends with the process that started it, however that one ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

# Looked up before there is a fork: between fork and exec nothing may be loaded or locked.
_prctl = ctypes.CDLL(None).prctl if sys.platform.startswith("linux") else None


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that forked it ends; for `preexec_fn`. Does nothing on systems other than
    Linux."""
    if _prctl is None or sys.platform == "win32":
        return
    parent = os.getppid()
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died between the fork and the call
        os.kill(os.getpid(), signal.SIGKILL)
