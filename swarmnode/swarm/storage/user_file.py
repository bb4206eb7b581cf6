"""Files that a person gives or keeps: read whole, and where that cannot be, it is said why."""

from __future__ import annotations

from pathlib import Path

from swarmnode.errors import UsageError


def read_user_file(path: Path, *, max_bytes: int, what: str) -> bytes | None:
    """Its content; None where there is no such file. `what` it should be, as in "a guestbook". Raises UsageError."""
    try:
        if path.stat().st_size > max_bytes:
            raise UsageError(f"{path} is too large, not {what}")
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except IsADirectoryError:
        raise UsageError(f"{path} is a folder, not {what}") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
