"""contrib/benchmarks: each script shows its help, and texts are decoded without drafts unless a row is about drafts."""

from __future__ import annotations

import ast
import asyncio
import json
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from swarmnode.client.swarm_client import SwarmClient
from swarmnode.serving.client.generation import GenerateOptions
from tests.contrib.script import CONTRIB, ROOT, load

FOLDER = CONTRIB / "benchmarks"
HELPER = FOLDER / "plain_decoding.py"
SCRIPTS = [
    path for path in sorted(FOLDER.glob("*.py")) if re.search(r"ArgumentParser\(|parse_options\(", path.read_text())
]
MEASURING = [path for path in (*FOLDER.glob("*.py"), *(CONTRIB / "studies").glob("*.py")) if path != HELPER]
CLIENTS = {"SwarmClient", "aconnect", "connect"}
COMMAND = re.compile(r"\bswarmnode (serve|generate|chat)\b")
PLAIN_WORDS = {"two_friends.py"}  # what two users type; only the first words of an answer are timed


@pytest.fixture
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo what a script changes in this process: its path, its environment, and the modules beside it."""
    before = set(sys.modules)
    monkeypatch.setattr("sys.path", [str(FOLDER), *sys.path])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == FOLDER:
            del sys.modules[name]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
@pytest.mark.usefixtures("as_it_was")
def test_help(script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", [script.name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 0
    assert "usage: " in capsys.readouterr().out


def ways_around(tree: ast.AST) -> Iterator[str]:
    """Yield each client, gateway or command of a script that would use drafts by default."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("swarmnode"):
            yield from (alias.name for alias in node.names if alias.name in CLIENTS)
        elif isinstance(node, ast.Attribute) and node.attr in CLIENTS and getattr(node.value, "id", "") == "swarmnode":
            yield f"swarmnode.{node.attr}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "server":
            yield ".server(…)"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and COMMAND.search(node.value):
            yield node.value
        elif (
            isinstance(node, ast.List)
            and node.elts
            and getattr(node.elts[0], "value", "") in ("serve", "generate", "chat")
        ):
            yield ast.unparse(node)


@pytest.mark.parametrize("script", MEASURING, ids=lambda script: script.name)
def test_clients_and_gateways_come_from_the_helper(script: Path) -> None:
    tree = ast.parse(script.read_text())
    for node in ast.walk(tree):  # docstrings may tell of commands
        if isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and ast.get_docstring(
            node
        ):
            del node.body[0]
    assert script.name in PLAIN_WORDS or list(ways_around(tree)) == []


@pytest.mark.parametrize(
    "source",
    [
        "from swarmnode.client.swarm_client import SwarmClient",
        "import swarmnode\nswarmnode.connect('x')",
        "from swarmnode import aconnect",
        "local.server('gateway')",
        "local.start('a', ['serve', 'x'])",
        "run('swarmnode generate x')",
    ],
)
def test_ways_around_the_helper_are_seen(source: str) -> None:
    assert len(list(ways_around(ast.parse(source)))) == 1


@pytest.mark.parametrize(
    ("options", "keywords", "drafts"),
    [
        (None, {}, "off"),
        (None, {"max_new_tokens": 3}, "off"),
        (GenerateOptions(), {}, "off"),
        (GenerateOptions(drafts="auto"), {"max_tokens": 3}, "off"),
        (None, {"drafts": "lookup"}, "lookup"),
        (GenerateOptions(max_new_tokens=3), {"drafts": "auto"}, "auto"),
    ],
)
def test_drafts_are_off_unless_they_are_named(
    options: GenerateOptions | None, keywords: dict[str, Any], drafts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    async def stream(_self: object, _prompt: object, options: GenerateOptions, **keywords: Any) -> None:
        asked.append(keywords.get("drafts", options.drafts))

    monkeypatch.setattr(SwarmClient, "stream", stream)
    helper: Any = load(HELPER)
    asyncio.run(helper.PlainClient.stream(object.__new__(helper.PlainClient), "a", options, **keywords))
    assert asked == [drafts]


PRINTING = [sys.executable, "-c", "print({'a': {'b': 1.5}, 'c': 2}.__repr__().replace(chr(39), chr(34)))"]


@pytest.mark.parametrize(
    ("labels", "rows"),
    [
        ({}, [["a b", "", "1.5"], ["c", "", "2"]]),
        ({"c": ["the other", "3"]}, [["the other", "3", "2"]]),
        ({"c": ["one", ""], "a b": ["two", "1"]}, [["one", "", "2"], ["two", "1", "1.5"]]),
    ],
)
def test_a_record_keeps_its_labels(
    labels: dict[str, list[str]], rows: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: Any = load(CONTRIB / "docs" / "figures.py")
    monkeypatch.setattr(figures, "FIGURES", tmp_path)
    (tmp_path / "x.json").write_text(json.dumps({"labels": labels} if labels else {}))
    figures.record("x", PRINTING)
    record = figures.read("x")
    assert record["rows"] == rows and record.get("labels", {}) == labels
    assert record["command"].startswith("python -c") and str(ROOT) not in json.dumps(record)
    with pytest.raises(ValueError, match="printed no d"):
        (tmp_path / "y.json").write_text(json.dumps({"labels": {"d": ["", ""]}}))
        figures.record("y", PRINTING)


def test_a_row_has_its_own_date_or_its_records() -> None:
    figures: Any = load(CONTRIB / "docs" / "figures.py")
    rows = [["one", "1", "2026-11-21"], ["two", "2", "2026-11-22"]]
    assert (
        figures.date_of({"columns": ["", "measured", "date"], "rows": rows, "date": "2026-11-23"}, "two")
        == "2026-11-22"
    )
    assert figures.date_of({"columns": ["", "measured"], "rows": rows, "date": "2026-11-23"}, "two") == "2026-11-23"
