"""Options of `run` from a file (HOME/node.toml or --config) and from environment variables such as SWARMNODE_RUN_MEMORY.

A flag overrides the environment, the environment overrides the file, and the file overrides the default.

memory = "6GB"              # as --memory
max_upload = "8Mbit"
exclusive = ["blender"]     # a repeatable option takes a list
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Any

from typer.core import TyperCommand

from swarmnode.cli.options.files import read_toml
from swarmnode.cli.options.option import file_key, path_option
from swarmnode.cli.terminal.console import fail, home_folder
from swarmnode.errors import UsageError

FILE = "node.toml"
PREFIX = "SWARMNODE_RUN_"
ELSEWHERE = frozenset({"home", "config", "help"})  # they tell where the file is, or do not concern a node

CONFIG = path_option(f"Read options from this file; default: {FILE} in the home folder.", "--config")


class ConfiguredCommand(TyperCommand):
    """Command whose options can also come from the environment and a file. `ctx.meta["origins"]` holds the source of each such
    option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse `args`, with values from the environment and the file as defaults. A wrong file ends the command with one line and
        exit code 2."""
        ctx.meta["args"] = list(args)
        given = self.make_parser(ctx).parse_args(list(args))[0]
        try:
            config, home = given.get("config_file"), given.get("home") or os.environ.get("SWARMNODE_HOME")
            path = Path(config) if config else home_folder(Path(home) if home else None) / FILE
            file = read_toml(path if config else None, path, what="a file of options")
            options = {_flag(option): option for option in self.params if _flag(option)}
            _check(file, options, path)
        except UsageError as error:
            fail(str(error), error.exit_code)
        environment = {
            name: os.environ[PREFIX + name.upper()] for name in options if PREFIX + name.upper() in os.environ
        }
        split = {name: text.split() if options[name].multiple else text for name, text in environment.items()}
        values = {**file, **split}
        ctx.default_map = {options[name].name: value for name, value in values.items()}
        ctx.meta["origins"] = {
            options[name].name: f"environment {PREFIX}{name.upper()}" if name in environment else f"file {path}"
            for name in values
        }
        return list(super().parse_args(ctx, args))


def _flag(option: Any) -> str:
    """Return the key of an option in a file: its flag with underscores; empty for an option that no file may set."""
    flags = [name for name in option.opts if name.startswith("--")]
    name = file_key(flags[0]) if flags else ""
    return "" if name in ELSEWHERE else name


def _check(file: dict[str, Any], options: dict[str, Any], path: Path) -> None:
    """Raise UsageError if a key in the file is no option, or a value has the wrong kind."""
    for name, value in file.items():
        option = options.get(name)
        if option is None:
            near = difflib.get_close_matches(name, options, 1)
            raise UsageError(f"{path}: there is no option {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        if option.multiple != isinstance(value, list):
            raise UsageError(f"{path}: {name} = {value}: write {'a list' if option.multiple else 'one value'}")
        if option.is_flag != isinstance(value, bool):
            raise UsageError(
                f"{path}: {name} = {value}: write {'true or false' if option.is_flag else 'a value, not true or false'}"
            )
