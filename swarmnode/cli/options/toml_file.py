"""Files that people write in TOML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from swarmnode.errors import UsageError
from swarmnode.swarm.storage.user_file import read_user_file

MAX_BYTES = 1 << 16


def read_toml(given: Path | None, usual: Path, *, what: str) -> dict[str, Any]:
    """Return the values of the file that is given, or of the usual one, which need not be there. `what` it should be, as in
    "a file of rules". Raises UsageError."""
    path = given or usual
    data = read_user_file(path, max_bytes=MAX_BYTES, what=what)
    if data is None and given is not None:
        raise UsageError(f"{path}: no such file")
    if data is None:
        return {}
    try:
        import tomllib
    except ImportError:  # Python 3.10
        import tomli as tomllib
    try:
        return dict(tomllib.loads(data.decode()))
    except ValueError as error:
        raise UsageError(f"{path} is not {what}: {error}") from None
