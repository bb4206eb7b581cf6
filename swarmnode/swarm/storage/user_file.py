"""Files that a person gives or keeps: read whole, and where that cannot be, it is said why."""

from __future__ import annotations

from pathlib import Path

from swarmnode.errors import UsageError
from swarmnode.files.bounded import read_bounded


def is_user_file(path: Path) -> bool:
    """Whether there is such a file here. What was typed may be longer than any file's name: an invite, a prompt."""
    try:
        return path.is_file()
    except OSError:
        return False


def read_user_file(path: Path, *, max_bytes: int, what: str) -> bytes | None:
    """Its content; None where there is no such file. `what` it should be, as in "a guestbook". Raises UsageError."""
    try:
        content = read_bounded(path, max_bytes)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a zero byte, which no path has
        return None
    except IsADirectoryError:
        raise UsageError(f"{path} is a folder, not {what}") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    if content is None:
        raise UsageError(f"{path} is too large, not {what}")
    return content
