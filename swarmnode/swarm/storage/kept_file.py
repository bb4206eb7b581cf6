"""Small JSON files that a peer keeps between runs. They are only a help: a missing or damaged one is no error."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from swarmnode.codec.decoding import DECODE_ERRORS
from swarmnode.errors import LocalError
from swarmnode.files.bounded import read_bounded
from swarmnode.files.durable import write_private

log = logging.getLogger(__name__)
T = TypeVar("T")


def read_kept(path: Path, content: type[T], *, max_bytes: int) -> T | None:
    """What is in the file; None where it is missing, larger than this, unreadable or something else."""
    try:
        raw = read_bounded(path, max_bytes)
        return None if raw is None else msgspec.json.decode(raw, type=content)
    except (OSError, *DECODE_ERRORS):
        return None


def write_kept(path: Path, content: Any) -> None:
    """Write the file, and its folder where there is none; bytes become base64. Raises LocalError."""
    write_private(path, msgspec.json.encode(content), make_folder=True)


def try_to_keep(path: Path, content: Any, what: str) -> bool:
    """Write the file as `write_kept` does. If that is not possible, log a warning that `what` is not kept, and return False."""
    try:
        write_kept(path, content)
    except LocalError as error:
        log.warning("%s not kept: %s", what, error)
        return False
    return True
