"""Files that are there after a power cut: written, flushed to the disk with the folder that names them, and only then relied on."""

from __future__ import annotations

import os
from pathlib import Path


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
