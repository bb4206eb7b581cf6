"""Options that name a file to be written."""

from __future__ import annotations

from pathlib import Path

from swarmnode.cli.terminal.console import fail
from swarmnode.errors import LocalError
from swarmnode.files.permissions import may_write


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
