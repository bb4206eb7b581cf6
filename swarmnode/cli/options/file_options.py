"""Files of the command line: TOML files of options, and output files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from swarmnode.errors import LocalError, UsageError
from swarmnode.files import may_write
from swarmnode.swarm.storage.small_files import read_user_file
from swarmnode.terminal.console import fail

MAX_BYTES = 1 << 16


def read_toml(chosen: Path | None, usual: Path, *, what: str) -> dict[str, Any]:
    """Return the values of the TOML file `chosen`, or of the file `usual` if `chosen` is None; empty if `usual` does not exist.
    `what` names the kind of file in errors, as in "a file of rules". Raises UsageError if the given file is missing, or a file
    cannot be parsed."""
    path = chosen or usual
    data = read_user_file(path, max_bytes=MAX_BYTES, what=what)
    if data is None and chosen is not None:
        raise UsageError(f"{path}: no such file; check its name")
    try:
        return {} if data is None else _parsed(data.decode())
    except ValueError as error:
        raise UsageError(f"{path} is not {what}: {error}") from None


def is_toml(text: str) -> bool:
    """Return whether a text is complete TOML."""
    try:
        _parsed(text)
    except ValueError:
        return False
    return True


def _parsed(text: str) -> dict[str, Any]:
    try:
        import tomllib
    except ImportError:  # Python 3.10
        import tomli as tomllib
    try:
        return dict(tomllib.loads(text))
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None


def check_output(option: str, path: Path | None, *, force: bool = True) -> None:
    """End the command with an error, before its work, if its result cannot be written to `path`. Without `force`, an existing file
    is an error too. Does nothing if `path` is None. `option` is the flag that the error names."""
    if path is None:
        return
    folder = path.absolute().parent
    if not folder.is_dir():
        fail(f"{option} {path}: no such folder; create it first", 2)
    if path.is_dir():
        fail(f"{option} {path}: this is a folder; give the name of a file", 2)
    if path.exists() and not force:
        fail(f"{option} {path}: it already exists; --force overwrites it", 2)
    if not may_write(path if path.exists() else folder):
        fail(f"{option} {path}: it cannot be written; choose a file in a folder of yours")


def output_path(path: Path, flag: str) -> Path:
    """Return `path` if a file can be written there, else end the command with an error."""
    check_output(flag, path)
    return path


def write_output(path: Path, text: str) -> None:
    """Write the result of a command to `path`. Raises LocalError, which names the file: the system's error for a full disk does
    not."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise LocalError(f"cannot write {path}: {error.strerror or error}; choose another path") from None
