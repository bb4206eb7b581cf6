"""Whether a command line that a configuration holds is one that swarmnode understands, without running it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import typer

from swarmnode.cli.main import app


def parse(arguments: Sequence[str]) -> str:
    """The name of the command that it calls. Raises click's UsageError for an option that is not there or not understood."""
    group = commands()
    name, *rest = arguments
    context = group.make_context("swarmnode", [name])
    command = group.get_command(context, name)
    assert command is not None, f"no command {name}"
    command.make_context(name, list(rest), parent=context)
    return name


@functools.cache
def commands() -> Any:
    """All of them; made once, of their signatures, which takes longer than to read a line."""
    return typer.main.get_command(app)
