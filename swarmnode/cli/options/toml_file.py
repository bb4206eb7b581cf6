"""Files that people write in TOML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from swarmnode.errors import UsageError
from swarmnode.swarm.storage.user_file import read_user_file


def read_toml(path: Path, *, max_bytes: int, what: str) -> dict[str, Any] | None:
    """Its values; None where there is no such file. `what` it should be, as in "a file of rules". Raises UsageError."""
    data = read_user_file(path, max_bytes=max_bytes, what=what)
    if data is None:
        return None
    try:
        import tomllib
    except ImportError:  # Python 3.10
        import tomli as tomllib
    try:
        return dict(tomllib.loads(data.decode()))
    except ValueError as error:
        raise UsageError(f"{path} is not {what}: {error}") from None
