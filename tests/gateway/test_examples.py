"""The examples, each against a swarm in virtual time."""

from __future__ import annotations

import ast
import inspect
import json
import re
import shlex
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.contrib.script import ROOT, load
from tests.gateway.conftest import serving
from tests.net.virtual import in_virtual_time
from tests.node.conftest import Founded

EXAMPLES = ROOT / "examples"


@in_virtual_time
async def test_a_chat_is_written(founded: Founded, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(founded, tmp_path) as served:
        answer = await load(EXAMPLES / "chat.py").chat(served.openai, "How are the hens?")
    assert answer and answer in capsys.readouterr().out


@in_virtual_time
async def test_a_conversation_with_tools_comes_to_an_end(founded: Founded, tmp_path: Path) -> None:
    async with serving(founded, tmp_path) as served:
        messages = await load(EXAMPLES / "tools.py").ask(served.openai, "What is the weather in Bern?")
    assert messages[0]["role"] == "user" and messages[-1]["role"] in ("assistant", "tool")


@in_virtual_time
async def test_an_answer_follows_its_schema(founded: Founded, tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    async with serving(founded, tmp_path) as served:
        script = load(EXAMPLES / "structured_output.py")
        told = await script.ask(served.openai, "How are the hens?")
    assert set(told) == set(script.SCHEMA["required"]) and json.dumps(told)


@in_virtual_time
async def test_the_notebook_is_run_to_its_end(
    founded: Founded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = json.loads((EXAMPLES / "notebook.ipynb").read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    async with serving(founded, tmp_path) as served:
        monkeypatch.setattr(openai, "AsyncOpenAI", lambda **_: served.openai)
        known: dict[str, Any] = {}
        for number, source in enumerate(sources):
            ran = eval(compile(source, f"cell {number}", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), known)
            if inspect.iscoroutine(ran):
                await ran
    assert known["answer"] and known["reply"].usage.prompt_tokens_details.cached_tokens > 0
    assert "a ready [0, 4]" in capsys.readouterr().out


def test_every_example_says_how_it_is_run() -> None:
    texts = {path.name: path.read_text() for path in EXAMPLES.glob("*.py")}
    assert len(texts) == 5 and all(f"python examples/{name}" in text for name, text in texts.items())


@in_virtual_time
async def test_the_commands_of_the_api_page_are_answered(founded: Founded, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "api.md").read_text().replace("\\\n", "")
    commands = re.findall(r"^curl .+", page, re.MULTILINE)
    async with serving(founded, tmp_path) as served:
        for command in commands:
            words = shlex.split(command, comments=True)
            path = next(word for word in words if word.startswith("http")).removeprefix("http://127.0.0.1:8000")
            body = words[words.index("-d") + 1] if "-d" in words else None
            method, kind = ("GET" if body is None else "POST"), {"Content-Type": "application/json"}
            told = await served.http.request(method, path, content=body, headers=kind)
            assert told.status_code == 200, (command, told.text)
            assert told.text.rstrip().endswith("[DONE]") if "-N" in words else told.json()
    assert len(commands) >= 6
