"""The whole command line: flags, defaults, bounds, headings and words of help change on purpose only.

After a change that is meant: python -m tests.cli.test_help > tests/cli/help.txt
"""

from __future__ import annotations

import ast
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from swarmnode.cli.main import app
from swarmnode.cli.options.files import read_toml
from swarmnode.cli.options.rules import RuleOptions, parse_rules
from swarmnode.terminal.option import definitions, file_key
from tests.cli.command import ROOT

FROZEN = Path(__file__).with_name("help.txt")
MOST_PARAMETERS = 13
PAGES = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("protocol/*.md")]


def commands(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """All of them by the words that call them, groups before what is in them."""
    yield words, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*words, name))


def told() -> str:
    """Each command with its heading and help, and each of its options: independent of how a version of typer draws them."""
    lines = []
    for words, command in commands(typer.main.get_command(app)):
        heading = getattr(command, "rich_help_panel", None)
        lines += [f"swarmnode {' '.join(words)} [{heading if isinstance(heading, str) else ''}]", command.help or ""]
        lines += map(line_of, command.params)
    return "\n".join(lines) + "\n"


def line_of(option: Any) -> str:
    """As in `--patience (SECONDS) = 60.0 [0.0 to 604800.0]: How long to wait.`"""
    flags = ", ".join((*option.opts, *option.secondary_opts))
    bounds = [f"{getattr(option, 'min', None)} to {getattr(option, 'max', None)}"] * (
        getattr(option, "max", None) is not None
    )
    signs = [sign for sign in ("required", "multiple", "is_flag", "hidden") if getattr(option, sign, False)]
    notes = ", ".join((*bounds, *signs, *([f"${option.envvar}"] if option.envvar else [])))
    return f"  {flags} ({option.metavar or ''}) = {option.default!r} [{notes}]: {getattr(option, 'help', None) or ''}"


def test_the_command_line_is_as_before() -> None:
    assert told() == FROZEN.read_text()


def test_no_page_puts_an_invite_into_a_command_line() -> None:
    """Other users of the machine can read command lines, and shells keep them."""
    told_at = [*PAGES, ROOT / "Dockerfile", *ROOT.glob("contrib/**/*.y*ml"), *ROOT.glob("contrib/**/*.service")]
    texts = {str(path): path.read_text() for path in [*told_at, *(ROOT / "swarmnode").rglob("*.py"), FROZEN]}
    shown = re.compile(r"swarmnode [a-z]+[^`\n#]* (swarm[12](…|\.\.\.|[a-z0-9]{20})|INVITE\b)|--from-literal=invite")
    assert [(path, found[0]) for path, text in texts.items() if (found := shown.search(text))] == []


def test_pages_name_flags_that_there_are() -> None:
    """In code of a page, behind a command's name: `run --min-holders`."""
    known = {
        " ".join(words): {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}
        for words, command in commands(typer.main.get_command(app))
    }
    wrong = []
    for page in PAGES:
        for line in re.findall(r"`([^`\n]+)`", page.read_text()):
            words = line.removeprefix("swarmnode ").split()
            name = " ".join(words[:2]) if " ".join(words[:2]) in known else words[0] if words else ""
            if name in known and name not in ("", "config", "service install"):
                wrong += [
                    f"{page.name}: {line}"
                    for flag in words
                    if flag.startswith("--") and flag not in known[name] | {"--help"}
                ]
    assert wrong == []


def test_the_volunteers_page_shows_what_files_may_say() -> None:
    """Its node.toml has options of `run`, and its rules.toml is one, with all rules that there are."""
    blocks = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "volunteer.md").read_text(), re.DOTALL)
    node, rules = (read(block) for block in blocks)
    options = {option.opts[0] for option in typer.main.get_command(app).commands["run"].params}
    assert {f"--{name.replace('_', '-')}" for name in node} <= options
    assert parse_rules(rules).any
    assert set(rules) == {file_key(definition.flag(name)) for name, definition in rule_definitions()}


def read(text: str) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(text)
        file.flush()
        return read_toml(None, Path(file.name), what="TOML")


def rule_definitions() -> list[tuple[str, Any]]:
    return [(name, each) for name, each in definitions(RuleOptions).items() if name != "rules_file"]


def test_no_command_takes_options_one_by_one() -> None:
    for path in (ROOT / "swarmnode" / "cli").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and any(
                ast.unparse(each) == "command" for each in node.decorator_list
            ):
                count = len(node.args.args) + len(node.args.kwonlyargs)
                assert count <= MOST_PARAMETERS, f"{path}: {node.name} has {count} parameters"


if __name__ == "__main__":
    print(told(), end="")
