"""Files of the command line: TOML files of options that are read, and files that are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from swarmnode.cli.terminal.console import fail
from swarmnode.errors import LocalError, UsageError
from swarmnode.files import may_write
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


def check_output(option: str, path: Path | None, *, force: bool = True) -> None:
    """Before a command begins to work: end it where it could not write there what it finds; without `force` over a file, too."""
    if path is None:
        return
    folder = path.absolute().parent
    if not folder.is_dir():
        fail(f"{option} {path}: no such folder", 2)
    if path.is_dir():
        fail(f"{option} {path}: a folder, where a file is to be written", 2)
    if path.exists() and not force:
        fail(f"{option} {path}: it exists; --force overwrites it", 2)
    if not may_write(path if path.exists() else folder):
        fail(f"{option} {path}: it cannot be written; name a file in a folder of yours")


def output_path(path: Path, flag: str) -> Path:
    """Return the path of a file that can be written. Ends the command if it cannot."""
    check_output(flag, path)
    return path


def write_output(path: Path, text: str) -> None:
    """What the command has found. Raises LocalError: the system does not say which file's disk is full."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise LocalError(f"cannot write {path}: {error.strerror or error}") from None
