"""Locks on files, which the system lets go of when their process ends, however it ends."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import IO

from swarmnode.errors import LocalError


def lock_alone(path: Path) -> IO[bytes] | None:
    """Hold the file until it is closed, if no other process holds it; else None. Raises OSError, LocalError on Windows."""
    return _locked(path, alone=True)


def lock_with_others(path: Path) -> IO[bytes]:
    """Hold the file together with others until it is closed; waits for who holds it alone. Raises as `lock_alone`."""
    file = _locked(path, alone=False)
    assert file is not None
    return file


def _locked(path: Path, *, alone: bool) -> IO[bytes] | None:
    if sys.platform == "win32":
        raise LocalError("Windows has no such locks on files: run swarmnode in WSL 2 or in Docker")
    import fcntl

    file = path.open("wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB if alone else fcntl.LOCK_SH)
    except BlockingIOError:
        file.close()
        return None
    except BaseException:
        file.close()
        raise
    return file
