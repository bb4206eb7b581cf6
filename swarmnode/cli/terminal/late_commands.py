"""Commands that are imported when somebody asks for them: one alone takes half of the time that all of them take."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import typer

ROOM = "swarmnode.cli"


class CommandPlace(NamedTuple):
    """Where a command is: a function that bears its name in a module of this room, unless another `attribute` is named, which may
    be an app with commands of its own. `settings` are what typer shall know besides."""

    module: str
    attribute: str = ""
    settings: Mapping[str, Any] = {}


def places(folder: str, names: str) -> dict[str, CommandPlace]:
    """Return the places of commands that have a module of their name in this folder."""
    return {name: CommandPlace(f"{folder}.{name}") for name in names.split()}


class LateCommands(Mapping[str, Any]):
    """Commands as click has them by their names, in the order of `groups`, which are theirs by heading."""

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
