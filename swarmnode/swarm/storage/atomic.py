"""Small private files that are never seen half written, and are still there after a power cut."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from swarmnode.errors import LocalError
from swarmnode.files.durable import replace_durably


def write_private(path: Path, data: bytes) -> None:
    """Write a file of mode 0600 so that a reader sees the old content or the new one. Raises LocalError."""
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            replace_durably(Path(temporary), path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                Path(temporary).unlink()
            raise
    except OSError as error:
        raise LocalError(f"cannot write {path}: {error.strerror or error}") from error
