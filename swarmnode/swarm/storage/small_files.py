"""Small JSON files that a peer keeps between runs, and folders that appear as a whole.

The small files are only a help: a missing or damaged one is no error.

Files that a person provides or keeps: read whole, with an error that says why if they cannot be read.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from swarmnode.codec.body import DECODE_ERRORS
from swarmnode.counting import format_bytes
from swarmnode.errors import LocalError, UsageError, with_advice
from swarmnode.files import existing, read_bounded, replace_durably, sync_tree, write_private
from swarmnode.swarm.storage.content import is_allowed_name

log = logging.getLogger(__name__)

T = TypeVar("T")


UNCONFIRMED_FILE = "UNCONFIRMED.txt"  # beside an exported checkpoint, if a part of it has only one holder


def check_free(out: Path, *, force: bool = False) -> None:
    """Raise UsageError unless `out` is free, an empty folder, or (with `force`) a folder with nothing but a
    checkpoint's files."""
    if not out.exists() and not out.is_symlink():
        return
    if not out.is_dir() or out.is_symlink():
        raise UsageError(f"{out} exists and is not a folder; name one that does not exist yet")
    names = [path.name for path in out.iterdir()]
    if names and not force:
        raise UsageError(f"{out} exists; name a folder that does not exist yet, or replace it with --force")
    foreign = sorted(name for name in names if name != UNCONFIRMED_FILE and not is_allowed_name(name))
    if foreign:
        raise UsageError(
            f"{out} holds {foreign[0]}, which is not a file of a checkpoint: it is not replaced, even with --force"
        )


@contextmanager
def new_folder(out: Path, *, force: bool = False) -> Iterator[Path]:
    """Yield an empty folder to write into. It becomes `out` at the end, or is removed if an error is raised.

    Raises UsageError as `check_free` does, LocalError if this machine cannot write there.
    """
    check_free(out, force=force)
    partial = out.parent / f".{out.name}.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        check_free(out, force=force)
        if out.is_dir():
            shutil.rmtree(out)
        sync_tree(partial)
        replace_durably(partial, out)
    except OSError as error:
        raise LocalError(f"cannot write {out}: {with_advice(error, 'name another place')}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def new_file(out: Path, *, force: bool = False) -> Iterator[IO[bytes]]:
    """Yield a file to write into. It becomes `out` at the end, or is removed if an error is raised.

    Raises UsageError if `out` exists, without `force`, or is no regular file; LocalError if this machine cannot write there.
    """
    if out.is_dir() or (out.exists() and not (out.is_file() and force)):
        raise UsageError(
            f"{out} exists; name a file that does not exist yet" + ("" if out.is_dir() else ", or give --force")
        )
    partial = out.parent / f".{out.name}.partial"
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        replace_durably(partial, out)
    except OSError as error:
        raise LocalError(f"cannot write {out}: {with_advice(error, 'name another place')}") from error
    finally:
        partial.unlink(missing_ok=True)


def check_space(out: Path, needed_bytes: int) -> None:
    """Raise LocalError if the disk has no room for `needed_bytes` at `out`."""
    folder = existing(out.absolute().parent)
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        raise LocalError(
            f"{out} takes {format_bytes(needed_bytes)}, and {folder} has {format_bytes(free_bytes)} left; free disk space, or "
            "name another place"
        )


def read_stored(path: Path, content: type[T], *, max_bytes: int) -> T | None:
    """Return the content of a file; None if it is missing, too large, unreadable or of another type."""
    try:
        raw = read_bounded(path, max_bytes)
        return None if raw is None else msgspec.json.decode(raw, type=content)
    except (OSError, *DECODE_ERRORS):
        return None


def write_stored(path: Path, content: Any) -> None:
    """Write the file, and its folder if there is none; bytes become base64. Raises LocalError if it cannot be written."""
    write_private(path, msgspec.json.encode(content), make_folder=True)


def try_to_keep(path: Path, content: Any, what: str) -> bool:
    """Write the file as `write_stored` does. If that fails, log a warning that `what` is not kept, and return False."""
    try:
        write_stored(path, content)
    except LocalError as error:
        log.warning("%s not kept: %s", what, error)
        return False
    return True


FileT = TypeVar("FileT", bound=msgspec.Struct)


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


def load_user_file(path: Path, content: type[FileT], *, max_bytes: int, what: str) -> FileT | None:
    """Read and decode the JSON of a user's file; None if there is none. Raises UsageError as `read_user_file` and
    `parse_user_file` do."""
    data = read_user_file(path, max_bytes=max_bytes, what=what)
    return None if data is None else parse_user_file(data, content, source=path, what=what)


def parse_user_file(data: bytes, content: type[FileT], *, source: object, what: str) -> FileT:
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
