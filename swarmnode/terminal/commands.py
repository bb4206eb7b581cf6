"""Commands that are imported when they are needed: importing one takes half of the time that importing all takes."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import typer
from typer.core import TyperGroup

from swarmnode.terminal.console import fail

ROOM = "swarmnode.cli"
# Click's class, or typer's own copy of it: the base class of typer's public exception.
WrongUsage: Any = typer.BadParameter.__bases__[0]


@contextlib.contextmanager
def in_one_line() -> Iterator[None]:
    """Turn a usage error inside the context into one line on standard error and typer.Exit."""
    try:
        yield
    except WrongUsage as error:
        message = error.format_message()
        if "\n" in message:  # the help, if no command was given
            raise
        command = "swarmnode" if error.ctx is None else error.ctx.command_path
        similar = getattr(error, "possibilities", None) or re.findall(r"Did you mean (.*)\?$", message)
        message = re.sub(r"\.? (\(Possible options: |Did you mean ).*", "", message).rstrip(".")
        advice = f"did you mean {' or '.join(similar)}? See" if similar else "see"
        fail(f"{message}; {advice} {command} --help", error.exit_code)


class GroupedHelp(TyperGroup):
    """Command group whose help lists commands under their headings, both in the order of their addition."""

    def make_context(self, info_name: Any, args: Any, parent: Any = None, **extra: Any) -> Any:
        """Parse the options before the command's name; report a usage error in one line."""
        with in_one_line():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: Any) -> Any:
        """Run the command, which parses the options after its name; report a usage error in one line."""
        with in_one_line():
            return super().invoke(ctx)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a section of the help for each heading."""
        panels: dict[str, list[tuple[str, Any]]] = {}
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                heading = getattr(command, "rich_help_panel", None) or "Commands"
                panels.setdefault(heading, []).append((name, command))
        widest = max((len(name) for rows in panels.values() for name, _ in rows), default=0)
        room = formatter.width - 6 - widest
        for heading, rows in panels.items():
            with formatter.section(heading):
                formatter.write_dl([(name, command.get_short_help_str(room)) for name, command in rows])


class CommandPlace(NamedTuple):
    """Location of a command: a function of the same name in a `module` of this room. An `attribute` names another function, or an
    app with commands of its own. `settings` are further keywords for typer."""

    module: str
    attribute: str = ""
    settings: Mapping[str, Any] = {}


def places(folder: str, names: str) -> dict[str, CommandPlace]:
    """Return the locations of commands that each have a module of their name in `folder`."""
    return {name: CommandPlace(f"{folder}.{name}") for name in names.split()}


class LateCommands(Mapping[str, Any]):
    """Mapping of click's commands by their names, imported on access, in the order of `groups`, which maps headings to commands."""

    def __init__(self, groups: Mapping[str, Mapping[str, CommandPlace]]) -> None:
        self._places = {name: (heading, place) for heading, group in groups.items() for name, place in group.items()}
        self._built: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"<LateCommands, {len(self._built)} of {len(self)} imported>"

    def __getitem__(self, name: str) -> Any:
        if name not in self._built:
            heading, place = self._places[name]
            self._built[name] = _built(name, heading, place)
        return self._built[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _built(name: str, heading: str, place: CommandPlace) -> Any:
    found = getattr(importlib.import_module(f"{ROOM}.{place.module}"), place.attribute or name)
    alone = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)
    if isinstance(found, typer.Typer):
        alone.add_typer(found, name=name, rich_help_panel=heading)
    else:
        alone.command(name, rich_help_panel=heading, **place.settings)(found)
    return typer.main.get_group(alone).commands[name]
