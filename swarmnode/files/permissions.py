"""What the system lets this process do with files, asked before it is tried."""

from __future__ import annotations

import os
from pathlib import Path


def existing(folder: Path) -> Path:
    """Return the folder, or the nearest one around it that exists."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def may_write(path: Path) -> bool:
    """Whether the file may be written, or files be put into the folder."""
    mode = os.W_OK | os.X_OK if path.is_dir() else os.W_OK
    return os.access(path, mode, effective_ids=os.access in os.supports_effective_ids)
