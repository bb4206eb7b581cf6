"""Whether a command line that a configuration holds is one that swarmnode understands, without running it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import typer

from swarmnode.cli.main import app


def parse(arguments: Sequence[str]) -> str:
    """The name of the command that it calls, of one or two words. Raises click's UsageError for an option that it does not have."""
    group = commands()
    context = group.make_context("swarmnode", list(arguments[:1]))
    name, command, rest = group.resolve_command(context, list(arguments))
    command.make_context(name, rest, parent=context)
    return str(name)


@functools.cache
def commands() -> Any:
    """All of them; made once, of their signatures, which takes longer than to read a line."""
    return typer.main.get_command(app)
