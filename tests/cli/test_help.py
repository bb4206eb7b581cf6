"""The whole command line: flags, defaults, bounds, headings and words of help change on purpose only.

After a change that is meant: python -m tests.cli.test_help > docs/cli.md
"""

from __future__ import annotations

import ast
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import typer.testing

from swarmnode.cli.main import TABLE, app
from swarmnode.cli.options.file_options import read_toml
from swarmnode.cli.options.node_options import RuleOptions, parse_rules
from swarmnode.terminal.commands import key_of
from swarmnode.terminal.option import definitions, file_key
from tests.cli.command import ROOT, assert_clear, invoke

PAGE = ROOT / "docs" / "cli.md"
HEAD = """# Commands

All commands by group, with all options; defaults, bounds and environment variables stand in brackets.
`swarmnode COMMAND --help-all` shows the same. Options of `run` may also stand in `node.toml` and in `SWARMNODE_RUN_…`;
see [volunteer](volunteer.md).
"""
MOST_PARAMETERS = 13
PAGES = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("protocol/*.md")]


def commands() -> dict[str, Any]:
    """All of them by the words that call them."""
    tree = typer.main.get_command(app)
    return {"": tree, **tree.commands}


def told() -> str:
    """The page of all commands and options: independent of how a version of typer draws them."""
    lines = [HEAD]
    for group, names in TABLE.groups.items():
        lines += [f"## {group}", ""]
        for name in names:
            command = commands()[name]
            rows = ["```text", *map(line_of, command.params), "```", ""] if command.params else []
            lines += [f"### swarmnode {name}", "", command.help, "", *rows]
    older = (f"swarmnode {old}: swarmnode {new}" for old, new in TABLE.renamed.items())
    lines += ["## Older spellings", "", "They work for one version, with a sentence that names the new one.", ""]
    return "\n".join([*lines, "```text", *older, "```"]) + "\n"


def line_of(option: Any) -> str:
    """As in `--patience SECONDS: How long to wait. [60.0; 0.0 to 604800.0]`."""
    flags = [] if option.param_type_name == "argument" else [", ".join((*option.opts, *option.secondary_opts))]
    default = [] if option.default in (None, "", []) or option.default is False else [f"{option.default}"]
    bounds = [] if getattr(option, "max", None) is None else [f"{option.min} to {option.max}"]
    signs = [sign for sign in ("required", "multiple", "hidden") if getattr(option, sign, False)]
    notes = "; ".join((*default, *bounds, *signs, *([f"${option.envvar}"] if option.envvar else [])))
    return f"{' '.join(filter(None, (*flags, option.metavar)))}: {option.help or ''}{notes and f' [{notes}]'}"


def test_the_command_line_is_as_before() -> None:
    assert told() == PAGE.read_text()


def options_of(command: Any) -> list[str]:
    return [key_of(each) for each in command.params if each.param_type_name == "option" and not each.hidden]


def flags_in(told: str) -> list[str]:
    """The flags of a help's rows."""
    sections = re.split(r"^\w[\w ]*:$", told, flags=re.MULTILINE)[1:]
    return re.findall(r"^  (?:-\w, )?--([\w-]+)", "".join(sections), re.MULTILINE)


def test_the_first_screen_fits_a_small_terminal() -> None:
    told = invoke("--help").stdout
    assert len(told.splitlines()) <= 23 and max(map(len, told.splitlines())) <= 80
    first = {name for name in commands() if re.search(rf"^  {name} ", told, re.MULTILINE) and name not in TABLE.groups}
    assert first | {"use"} == {*TABLE.first, "use"} and len(TABLE.first) == 11
    words = {name.split()[0] for name in commands() if name}
    assert len(words) <= 30 and all(re.search(rf"\b{word}\b", told) for word in words)
    assert invoke("help").stdout == told


def test_each_command_has_one_line_in_its_group() -> None:
    for group, names in TABLE.groups.items():
        lines = invoke("help", group).stdout.splitlines()
        rows = [line for line in lines if line.startswith("  ")]
        assert [row[2:].split("  ")[0] for row in rows] == list(names) and max(map(len, rows)) <= 80, rows
    told = invoke("--help-all").stdout
    assert all(f"\n  {name} " in told for names in TABLE.groups.values() for name in names)


def test_help_shows_few_options_and_help_all_every_one() -> None:
    topics = {name.split("@")[0] for names in TABLE.topics.values() for name in names.split()}
    every: set[str] = set()
    for name, command in commands().items():
        if not name:
            continue
        options = options_of(command)
        assert {*command.shown} <= {*options}, "the table names options that there are"
        shown, all_of_it = (invoke(*name.split(), flag).stdout for flag in ("--help", "--help-all"))
        assert len(flags_in(shown)) <= 10 and all(f"--{each}" in all_of_it for each in options)
        assert sorted(flags_in(all_of_it)) == sorted(options)
        if len(options) > 10:
            assert f"shows {len(options) - len(command.shown)} more options" in shown
            assert "Options:" not in all_of_it, "each has a topic"
            every |= {*options}
    assert topics <= every, "the topics name options that there are"


@pytest.mark.parametrize("name", [name for names in TABLE.groups.values() for name in names])
def test_help_can_be_asked_for_anywhere(name: str) -> None:
    words = name.split()
    told = invoke(*words, "--help")
    assert told.returncode == 0 and told.stdout.startswith(f"Usage: swarmnode {name} ")
    for asked in (
        ["help", *words],
        ["--help", *words],
        [*words, "-h"],
        [*words, "help"],
        [*words, "friends", "--memory", "--help"],
    ):
        if asked[:2] != ["help", *TABLE.groups] and not (asked[0] == "help" and name in TABLE.groups):
            assert invoke(*asked).stdout == told.stdout


@pytest.mark.parametrize("old", TABLE.renamed)
def test_an_old_spelling_does_the_same_with_a_sentence(old: str, tmp_path: Path) -> None:
    new = TABLE.renamed[old]
    sentence = f"`swarmnode {old}` is now `swarmnode {new}`"
    is_slow = old in ("bench", "bootstrap", "mcp")  # each begins its work, or imports what that needs
    several = (), ("--json",), ("./nobody",), ("--home", str(tmp_path / "other"))
    for rest in (("--no-such-option",), *(() if is_slow else several)):
        before, now = (invoke(*name.split(), *rest, home=tmp_path, given="") for name in (old, new))
        first, *others = before.stderr.splitlines()
        assert sentence in first and sentence not in before.stdout
        assert (before.returncode, before.stdout, others) == (now.returncode, now.stdout, now.stderr.splitlines())


def misspelled(word: str) -> Iterator[str]:
    """Of a word: one letter too few, two in the wrong order, one too many, and a capital."""
    for at in range(1, len(word) - 1):
        yield word[:at] + word[at + 1 :]
        yield word[:at] + word[at + 1] + word[at] + word[at + 2 :]
        yield word[:at] + word[at] + word[at:]
    yield word.capitalize()


@pytest.mark.parametrize("name", [name for name in commands() if len(name) > 3])
def test_near_misses_are_answered_with_the_command(name: str) -> None:
    known = {*commands(), *TABLE.renamed, *TABLE.synonyms, *" ".join(TABLE.advice).split(), "help"}
    *first, last = name.split()
    takes_words = first and any(each.param_type_name == "argument" for each in commands()[first[0]].params)
    if takes_words:
        return  # `why tarce` may be about a machine of that name
    for wrong in misspelled(last):
        if wrong not in known and " ".join((*first, wrong)) not in known:
            assert_clear(invoke(*first, wrong), 2, f"`swarmnode {name}`")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("ls", "swarmnode models"),
        ("rm", "swarmnode leave"),
        ("pull", "swarmnode host"),
        ("uninstall", "service uninstall"),
        ("start", "swarmnode run"),
        ("delete", "swarmnode leave"),
        ("unistall", "service uninstall"),
        ("tarce", "why trace"),
        ("fnish", "pause --after-work"),
        ("isntall", "service"),
    ],
)
def test_words_of_other_programs_are_answered_with_the_command(typed: str, meant: str) -> None:
    assert_clear(invoke(typed), 2, typed, meant)
    assert_clear(invoke("help", typed), 2, typed, meant)


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("", {name.split()[0] for name in commands() if name}),
        ("why ", {"trace", "credit", "receipt"}),
        ("adapter ", {"list", "add", "remove", "block", "unblock"}),
        ("models p", {"prune"}),
        ("plan simulate --workl", {"--workload"}),
        ("run --max-gpu-t", {"--max-gpu-temperature"}),
        ("run --help", {"--help", "--help-all"}),
        ("finish --le", {"--leave"}),
    ],
)
def test_completion_completes_all(typed: str, completed: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    words = f"swarmnode {typed}"
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - (not words.endswith(" ")))}
    for name, value in {"_SWARMNODE_COMPLETE": "complete_bash", **asked}.items():
        monkeypatch.setenv(name, value)
    result = typer.testing.CliRunner().invoke(app, [], prog_name="swarmnode")
    assert completed == set(result.stdout.split())


def test_no_page_puts_an_invite_into_a_command_line() -> None:
    """Other users of the machine can read command lines, and shells keep them."""
    told_at = [*PAGES, ROOT / "Dockerfile", *ROOT.glob("contrib/**/*.y*ml"), *ROOT.glob("contrib/**/*.service")]
    texts = {str(path): path.read_text() for path in [*told_at, *(ROOT / "swarmnode").rglob("*.py")]}
    shown = re.compile(r"swarmnode [a-z]+[^`\n#]* (swarm[12](…|\.\.\.|[a-z0-9]{20})|INVITE\b)|--from-literal=invite")
    assert [(path, found[0]) for path, text in texts.items() if (found := shown.search(text))] == []


def test_pages_name_flags_that_there_are() -> None:
    """In code of a page, behind a command's name: `run --min-holders`."""
    known = {
        name: {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}
        for name, command in commands().items()
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
                    if flag.startswith("--") and flag not in known[name] | {"--help", "--help-all"}
                ]
    assert wrong == []


def test_texts_use_the_new_spellings() -> None:
    """Of pages, hints, units and containers, where they write a whole command."""
    folders = ("docs", "protocol", "contrib", "examples", "swarmnode", ".")
    files = [
        path for folder in folders for path in (ROOT / folder).glob("*" if folder == "." else "**/*") if path.is_file()
    ]
    kinds = {".md", ".py", ".js", ".html", ".yaml", ".toml", ".service", ".ipynb", ""}
    old = "|".join(sorted(map(re.escape, TABLE.renamed), key=len, reverse=True))
    wrong = []
    for path in files:
        if path.suffix in kinds and path not in (PAGE, ROOT / "swarmnode/cli/main.py"):
            found = re.findall(
                rf"(?:[`$>(]|: |^)\s*swarmnode (?:{old})\b(?![-.=])", path.read_text(errors="replace"), re.MULTILINE
            )
            wrong += [f"{path.relative_to(ROOT)}: {words}" for words in found]
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
