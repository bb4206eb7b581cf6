"""Files that a person provides or keeps: read whole, with an error that says why if they cannot be read."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from swarmnode.codec.body import DECODE_ERRORS
from swarmnode.errors import UsageError
from swarmnode.files import read_bounded

T = TypeVar("T", bound=msgspec.Struct)


class VersionedFile(msgspec.Struct):
    """JSON of a user's file; bytes are base64."""

    swarmnode: int  # format


Versioned = TypeVar("Versioned", bound=VersionedFile)


def is_user_file(path: Path) -> bool:
    """Return whether `path` is an existing file; False also if it is longer than any file name, as an invite or a
    prompt may be."""
    try:
        return path.is_file()
    except OSError:
        return False


def read_user_file(path: Path, *, max_bytes: int, what: str) -> bytes | None:
    """Read a file; None if there is none. `what` names the expected kind of file, as in "a guestbook".

    Raises UsageError if it is a folder, too large or cannot be read.
    """
    try:
        content = read_bounded(path, max_bytes)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a zero byte, which no path has
        return None
    except IsADirectoryError:
        raise UsageError(f"{path} is a folder, not {what}; give a file") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}; check its permissions") from None
    if content is None:
        raise UsageError(f"{path} is too large, not {what}; give another file")
    return content


def parse_user_file(data: bytes, content: type[T], *, source: object, what: str) -> T:
    """Decode the JSON of a user's file. Raises UsageError that names `source` if it is not `what` it should be."""
    try:
        return msgspec.json.decode(data, type=content)
    except DECODE_ERRORS as error:
        raise UsageError(f"{source} is not {what}: {error}") from None


def parse_versioned(data: bytes, content: type[Versioned], *, source: object, what: str, newest: int) -> Versioned:
    """Decode a user's file as `parse_user_file` does. Raises UsageError also if its format is newer than `newest`."""
    parsed = parse_user_file(data, content, source=source, what=what)
    if parsed.swarmnode > newest:
        raise UsageError(f"{source} has format {parsed.swarmnode}, this swarmnode knows {newest}: upgrade swarmnode")
    return parsed
