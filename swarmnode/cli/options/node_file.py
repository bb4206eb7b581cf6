"""Options of `run` from a file (HOME/node.toml or --config) and from environment variables such as SWARMNODE_RUN_MEMORY; and their
changes while a node runs.

A flag overrides the environment, the environment overrides the file, and the file overrides the default.

memory = "6GB"              # as --memory
max_upload = "8Mbit"
exclusive = ["blender"]     # a repeatable option takes a list
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from swarmnode.cli.options import node_options
from swarmnode.cli.options.file_options import is_toml, read_toml
from swarmnode.cli.options.node_options import NodeOptions
from swarmnode.decisions import Topic
from swarmnode.errors import LocalError, SwarmnodeError, UsageError
from swarmnode.files import home_folder, write_private
from swarmnode.terminal.commands import CommandWithTopics, WrongUsage
from swarmnode.terminal.console import fail
from swarmnode.terminal.option import Definition, build, definitions, file_key, path_option

if TYPE_CHECKING:
    from swarmnode.node.node import Node
    from swarmnode.node.node_config import NodeConfig

FILE = "node.toml"
PREFIX = "SWARMNODE_RUN_"
ELSEWHERE = frozenset({"home", "config", "help"})  # they tell where the file is, or do not concern a node

CONFIG = path_option(f"Read options from this file; default: {FILE} in the home folder.", "--config")


class ConfiguredCommand(CommandWithTopics):
    """Command whose options can also come from the environment and a file. `ctx.meta["origins"]` holds the source of each such
    option. A command other than `run` takes only those that limit what a node lends, and leaves the others to `run`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse `args`, with values from the environment and the file as defaults. A wrong file ends the command with one line and
        exit code 2."""
        ctx.meta["args"] = list(args)
        given = self.make_parser(ctx).parse_args(list(args))[0]
        try:
            config, home = given.get("config_file"), given.get("home") or os.environ.get("SWARMNODE_HOME")
            path = Path(config) if config else home_folder(home) / FILE
            file = read_toml(path if config else None, path, what="a file of options")
            options = {_flag(option): option for option in self.params if _flag(option)}
            if self.name != "run":
                options = {key: option for key, option in options.items() if key in _OPTIONS}
                file = {key: value for key, value in file.items() if key in options}
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


LIMITS = ("memory", "disk", "cpu_share", "max_upload", "max_download", "max_gpu_temperature", "max_gpu_power")
_OPTIONS = {
    key: (field, definition)
    for field, definition in definitions(NodeOptions).items()
    if (key := file_key(definition.flag(field))) in (*LIMITS, *node_options.RULES)
}


def with_limits(base: NodeOptions, typed: Mapping[str, Any]) -> NodeConfig:
    """Return the settings of a node: the limits and rules among a command's `typed` options, and the other options of `base`.
    Raises UsageError."""
    fields = [field for field, _ in _OPTIONS.values()]
    lent = build(NodeOptions, {field: typed[field] for field in (*fields, "rules_file") if field in typed})
    limits = {_OPTIONS[key][0]: getattr(lent, _OPTIONS[key][0]) for key in LIMITS}
    return replace(base, rules=lent.rules, **limits).config()


class LendingOptions:
    """Limits and rules of a running node that its owner may change meanwhile. Names and values are as in the files, which keep the
    changes.

    `context` is that of the node's command; `read` makes the node's settings of the command's typed options, by default as `run`
    does. If `context` is None, the node has only the rules of the home folder.
    """

    def __init__(
        self,
        home: Path,
        node: Node,
        context: typer.Context | None = None,
        read: Callable[[Mapping[str, Any]], NodeConfig] = lambda typed: build(NodeOptions, typed).config(),
    ) -> None:
        self._node = node
        self._context = context
        self._read = read
        self._home = home
        given = {} if context is None else context.params
        self._config = given.get("config_file") or home / FILE
        self._rules = given.get("rules_file") or home / node_options.FILE
        self._held: dict[str, Any] = {}  # by field: changed here, though the command line says otherwise

    def listed(self) -> list[dict[str, Any]]:
        """Return the options as they are in force: `name`, `value` as typed (empty: off), `default`, `kind` (text, list or yes),
        `example`, `help`, and the `origin` of the value."""
        return [self._row(key, *_OPTIONS[key]) for key in self._keys()]

    def change(self, texts: Mapping[str, Any]) -> str:
        """Change options of these names, empty values turning them off, and keep them for later starts. Returns sentences about the
        effect. Raises UsageError or LocalError, and changes nothing, if a value is not valid or a file cannot be written."""
        for key, value in texts.items():
            if key not in self._keys():
                raise UsageError(f"there is no option {key!r} to change; choose from {', '.join(self._keys())}")
            _check_value(key, value)
        overridden = [key for key in texts if self._override(key)]
        held = {_OPTIONS[key][0]: _typed(key, texts[key]) for key in overridden}
        before = {path: path.read_text() if path.is_file() else None for path in (self._config, self._rules)}
        files = self._changed(texts, {path: text or "" for path, text in before.items()})
        written = [path for path, text in files.items() if text != (before[path] or "")]
        for path in written:
            write_private(path.resolve(), files[path].encode(), make_folder=True)
        was, self._held = self._held, {**self._held, **held}
        try:
            rest = self._apply()
        except LocalError:
            self._held = was
            for path in written:
                _put_back(path, before[path])
            raise
        told = [f"{key}: {_value_text(value)}" for key, value in texts.items()]
        self._node.lending.decisions.record(Topic.LENDING, "its owner changes what it lends", told)
        return " ".join(_sentences(written, overridden, [key for key in texts if _OPTIONS[key][0] in rest]))

    def reload(self) -> str:
        """Read the options again, from flags and files, and apply them as far as the running node can change. Returns a sentence
        about it. Raises LocalError if an option is wrong; then nothing changes."""
        rest = self._apply()
        return f"the options were read again{'; restart the node for ' if rest else ''}{', '.join(rest)}"

    def _keys(self) -> list[str]:
        taken = {} if self._context is None else self._context.params
        return [key for key in (*LIMITS, *node_options.RULES) if key in node_options.RULES or _OPTIONS[key][0] in taken]

    def _row(self, key: str, field: str, definition: Definition) -> dict[str, Any]:
        default = "" if definition.text is None else definition.text
        value, origin = default, ""
        for path, values in self._files().items():  # the later one has priority
            if key in values:
                value, origin = values[key], f"file {path}"
        if given := self._override(key):
            value, origin = self._held.get(field, self._context.params[field] if self._context else ""), given
        if definition.typed is float and value != "":
            value = f"{float(value):g}"
        kind = {bool: "yes", list[str]: "list"}.get(definition.typed, "text")
        example, told = definition.details.get("metavar") or "", definition.details["help"]
        row = {"name": key, "kind": kind, "value": value, "default": default, "example": example, "help": told}
        return {**row, "origin": origin}

    def _files(self) -> dict[Path, dict[str, Any]]:
        found = {self._rules: read_toml(None, self._rules, what="a file of rules")}
        if self._context is not None:
            found[self._config] = read_toml(None, self._config, what="a file of options")
        return found

    def _override(self, key: str) -> str:
        """Return the flag or the environment variable that gives this option, and wins over any file; empty if none does."""
        if self._context is None:
            return ""
        field, definition = _OPTIONS[key]
        source = self._context.get_parameter_source(field)
        origin = str(self._context.meta["origins"].get(field, ""))
        flag = definition.flag(field) if source is not None and source.name == "COMMANDLINE" else ""
        return flag or (origin if origin.startswith("environment") else "")

    def _changed(self, texts: Mapping[str, Any], files: dict[Path, str]) -> dict[Path, str]:
        """Return the texts of the files with the changed options: each in the file that has it, else rules in the file of rules."""
        values = self._files()
        for key, value in texts.items():
            is_rule = key in node_options.RULES and key not in values.get(self._config, {})
            place = self._rules if is_rule else self._config
            for path, known in values.items():
                if path == place and value:
                    files[path] = _with_line(files[path], key, _line(key, value))
                elif key in known:
                    files[path] = _with_line(files[path], key, "")
        return files

    def _apply(self) -> list[str]:
        """Apply flags, files and held values to the node; return the fields that need a restart. Raises LocalError."""
        context = self._context
        try:
            if context is None:
                return self._node.follow(replace(self._node.config, rules=node_options.read_rules(self._home)))
            again = context.command.make_context(context.info_name, list(context.meta["args"]), parent=context.parent)
            return self._node.follow(self._read({**again.params, **self._held}))
        except (SwarmnodeError, WrongUsage) as error:
            raise LocalError(f"the options stay as they were: {error}") from None
        except typer.Exit:  # the error has been printed
            raise LocalError("the options stay as they were; the node's log says why") from None


def _check_value(key: str, value: Any) -> None:
    """Check a value as the command line does. Raises UsageError."""
    field, definition = _OPTIONS[key]
    kind = {bool: bool, list[str]: list}.get(definition.typed, str)
    if not isinstance(value, kind) or not str(value).isprintable():
        form = {bool: "true or false", list: "a list", str: "a text"}[kind]
        raise UsageError(f"{key} = {value}: write {form}")
    if not value:
        return
    definition.read(field, value)
    if definition.typed is float:
        least, most, text = definition.details["min"], definition.details["max"], str(value)
        if not re.fullmatch(r"\d+(\.\d+)?", text) or not least <= float(text) <= most:
            raise UsageError(f"{definition.flag(field)} {value}: give a number from {least} to {most}")


def _typed(key: str, value: Any) -> Any:
    """Return a value as the command line gives it to the options: the default if it is empty."""
    definition = _OPTIONS[key][1]
    if not value:
        return definition.text
    return float(value) if definition.typed is float else value


def _value_text(value: Any) -> str:
    if isinstance(value, list):
        value = ", ".join(value)
    return "on" if value is True else value or "off"


def _line(key: str, value: Any) -> str:
    is_number = _OPTIONS[key][1].typed is float
    return f"{key} = {value if is_number else json.dumps(value, ensure_ascii=False)}\n"


def _with_line(text: str, key: str, line: str) -> str:
    """Return the text of a TOML file with `line` in place of the lines of `key`, or at the end."""
    lines = text.splitlines(keepends=True)
    start = next((at for at, each in enumerate(lines) if re.match(rf"\s*[\"']?{key}[\"']?\s*=", each)), len(lines))
    ends = (end for end in range(start + 1, len(lines) + 1) if is_toml("".join(lines[start:end])))
    before, after = "".join(lines[:start]), "".join(lines[next(ends, len(lines)) :])
    newline = "\n" if line and before and not before.endswith("\n") else ""
    return before + newline + line + after


def _put_back(path: Path, text: str | None) -> None:
    if text is None:
        path.unlink(missing_ok=True)
    else:
        write_private(path.resolve(), text.encode())


def _sentences(written: list[Path], overridden: list[str], rest: list[str]) -> list[str]:
    """Return sentences about changed options: the files that keep them, those that the command line wins over, those that need a
    restart."""
    told = [f"Kept in {' and '.join(map(str, written))} for later starts."] if written else []
    if overridden:
        flags = ", ".join(_OPTIONS[key][1].flag(_OPTIONS[key][0]) for key in overridden)
        told.append(f"This run was started with {flags}: the next start has that again, unless you leave it out.")
    if rest:
        told.append(f"Restart the node for {', '.join(rest)}.")
    return told or ["Nothing has changed."]
