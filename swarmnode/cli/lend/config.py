"""Command `swarmnode config`: show the options of a node with their sources."""

from __future__ import annotations

from typing import Any

import typer

from swarmnode.cli.options.node_file import FILE
from swarmnode.cli.options.node_options import NodeOptions
from swarmnode.terminal.console import JSON, command, print_json, say
from swarmnode.terminal.option import build, option


@command
def config(
    context: typer.Context,
    *,
    show: bool = option(False, "Print each option, its value, and the value's source."),
    as_json: bool = JSON,
) -> None:
    """Check the options that `run` would use.

    They come from the flags given here, the environment and node.toml. Add any options of `run`.

    Example: swarmnode config --show --memory 6GB
    """
    parent: Any = context.parent
    command = parent.command.get_command(parent, "run")
    taken = command.make_context("run", list(context.args), parent=parent)
    build(NodeOptions, taken.params).config()
    rows = [
        _row(taken, option) for option in command.params if option.param_type_name == "option" and not option.hidden
    ]
    if as_json:
        print_json(rows)
        return
    if not show:
        say(f"All options are valid. --show prints them, from flags, the environment and {FILE} in the home folder.")
        return
    from swarmnode.terminal import tables

    table = tables.new_table("", ("option", "value", "from"))
    for row in rows:
        table.add_row(row["option"], _told(row["value"]), row["from"])
    tables.show(table)


def _row(taken: Any, option: Any) -> dict[str, Any]:
    value, source = taken.params.get(option.name), taken.get_parameter_source(option.name)
    origins = {"COMMANDLINE": "flag", "ENVIRONMENT": f"environment {option.envvar}", "DEFAULT_MAP": "file"}
    origin = origins.get("" if source is None else source.name, "default")
    if origin == "file":
        origin = taken.meta["origins"][option.name]
    plain = value if isinstance(value, bool | int | float | list | None) else str(value)
    return {"option": option.opts[0], "value": plain, "from": origin}


def _told(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value)
