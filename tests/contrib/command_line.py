"""Whether a command line that a configuration holds is one that swarmnode understands, without running it."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from swarmnode.cli.main import app


def parse(arguments: Sequence[str]) -> str:
    """The name of the command that it calls. Raises click's UsageError for an option that is not there or not understood."""
    group = typer.main.get_command(app)
    name, *rest = arguments
    context = group.make_context("swarmnode", [name])
    command = group.get_command(context, name)  # type: ignore[attr-defined]
    assert command is not None, f"no command {name}"
    command.make_context(name, list(rest), parent=context)
    return name
