"""Small JSON files that a peer keeps between runs. They are only a help: a missing or damaged one is no error."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from swarmnode.codec.decoding import DECODE_ERRORS
from swarmnode.errors import LocalError
from swarmnode.swarm.storage.atomic import write_private

T = TypeVar("T")


def read_kept(path: Path, content: type[T], *, max_bytes: int) -> T | None:
    """What is in the file; None where it is missing, larger than this, unreadable or something else."""
    try:
        if path.stat().st_size > max_bytes:
            return None
        return msgspec.json.decode(path.read_bytes(), type=content)
    except (OSError, *DECODE_ERRORS):
        return None


def write_kept(path: Path, content: Any) -> None:
    """Write the file, and its folder where there is none; bytes become base64. Raises LocalError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LocalError(f"cannot write {path}: {error.strerror or error}") from error
    write_private(path, msgspec.json.encode(content))
