"""Files read no further than they may be long: of a pipe or a device nothing tells beforehand how much comes."""

from __future__ import annotations

from pathlib import Path


def read_bounded(path: str | Path, max_bytes: int) -> bytes | None:
    """The content; None where there is more of it. Raises OSError, and ValueError for what is no path."""
    with Path(path).open("rb") as file:
        content = file.read(max_bytes + 1)
    return content if len(content) <= max_bytes else None
