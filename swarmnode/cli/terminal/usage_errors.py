"""What typer raises where an option is wrong: told in one line, as all other errors are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import typer

from swarmnode.cli.terminal.console import fail

# Click's class, or the copy of it that typer brings along since it does: the one that its public exception derives from.
WrongUsage: Any = typer.BadParameter.__bases__[0]


@contextlib.contextmanager
def in_one_line() -> Iterator[None]:
    """Raises typer.Exit in the place of what was typed wrongly, which is told."""
    try:
        yield
    except WrongUsage as error:
        message = error.format_message()
        if "\n" in message:  # the help, for who gave no command at all
            raise
        command = "swarmnode" if error.ctx is None else error.ctx.command_path
        fail(f"{message.rstrip('.')}; see {command} --help", error.exit_code)
