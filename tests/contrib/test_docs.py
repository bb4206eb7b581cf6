"""Commands in the documentation are ones that swarmnode understands, and files that it names are there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contrib.command_line import parse
from tests.contrib.script import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# An operator of a shell, and what stands before it: `swarmnode run x &`, `swarmnode status x | jq`.
END = {"&", "|", "&&", ">", ";"}


def shell_lines(page: Path) -> Iterator[str]:
    """The lines of the page's shell blocks, continued ones joined."""
    for block in re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        yield from block.replace("\\\n", " ").splitlines()


def commands(line: str) -> Iterator[list[str]]:
    """The arguments of each call of swarmnode in a line; also behind `docker … exec SERVICE`."""
    words = shlex.split(line, comments=True)
    for start, word in enumerate(words):
        rest = words[start + 1 :]
        if Path(word).name == "swarmnode" and rest and rest[0].isalpha() and rest[0] != "swarmnode":
            yield rest[: next((index for index, each in enumerate(rest) if each in END), len(rest))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_understood(page: Path) -> None:
    for line in shell_lines(page):
        for arguments in commands(line):
            parse(arguments)


def test_commands_are_found() -> None:
    assert list(commands("FOO=1 swarmnode run x --name 'a b' & # a word")) == [["run", "x", "--name", "a b"]]
    assert list(commands(".venv/bin/swarmnode demo && swarmnode status x | jq .")) == [["demo"], ["status", "x"]]
    assert sum(len(list(commands(line))) for page in PAGES for line in shell_lines(page)) > 20


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_of_the_repository_are_there(page: Path) -> None:
    named = set(re.findall(r"(?<![\w/])(?:contrib|swarmnode|tests|protocol)/[\w@./-]*\w", page.read_text()))
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []
