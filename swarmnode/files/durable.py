"""Files that are there after a power cut: written, flushed to the disk with the folder that names them, and only then relied on."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from swarmnode.errors import LocalError


def sync(path: Path) -> None:
    """Have a file or a folder on the disk, whatever happens to the power. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Have a folder with all that is in it on the disk. Raises OSError."""
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


def replace_durably(new: Path, path: Path) -> None:
    """Put a file or folder that is on the disk into the place of `path`, at once and for good. Raises OSError."""
    new.replace(path)
    sync(path.parent)


def write_private(path: Path, data: bytes, *, make_folder: bool = False) -> None:
    """Write a file of mode 0600 so that a reader sees the old content or the new one; with `make_folder` also the folder around it,
    if there is none. Raises LocalError if that is not possible."""
    try:
        if make_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
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
