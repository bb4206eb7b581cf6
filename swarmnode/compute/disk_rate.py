"""How fast a disk takes and gives a file: what fetching and loading weights may be bound by."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from swarmnode.errors import LocalError

SIZE_BYTES = 64 << 20
PIECE = bytes(1 << 20)


def measure_disk(folder: Path, *, clock: Callable[[], float] = time.perf_counter) -> tuple[float, float]:
    """Bytes/s written, until they are on the disk, and read, past the system's cache where it can be told to forget.

    The file is taken away again. Raises LocalError where nothing can be written there.
    """
    pieces = max(1, SIZE_BYTES // len(PIECE))
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            began_s = clock()
            for _ in range(pieces):
                file.write(PIECE)
            os.fsync(file.fileno())
            written_s = clock() - began_s
            if sys.platform == "linux":
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            began_s = clock()
            while file.read(len(PIECE)):
                pass
            read_s = clock() - began_s
    except OSError as error:
        raise LocalError(f"cannot write {folder}: {error.strerror or error}") from error
    return pieces * len(PIECE) / max(written_s, 1e-9), pieces * len(PIECE) / max(read_s, 1e-9)
