"""Options that name a file to be written."""

from __future__ import annotations

from pathlib import Path

from swarmnode.cli.terminal.console import fail


def check_output(option: str, path: Path | None) -> None:
    """Before a command begins to work: end it where it could not write there what it finds."""
    if path is not None and not path.absolute().parent.is_dir():
        fail(f"{option} {path}: no such folder", 2)
    if path is not None and path.is_dir():
        fail(f"{option} {path}: a folder, where a file is to be written", 2)
