"""What tools are told, and what is refused."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml

from swarmnode.errors import UsageError
from swarmnode.gateway.integrations.configurations import TOOLS, Endpoint
from tests.cli.command import assert_clear, invoke

MODELS = [{"id": "friends"}, {"id": 'odd "name": x', "task": "generate"}]
ENCODERS = [{"id": "vectors", "task": "embed"}, {"id": "classes", "task": "classify"}]


class Gateway(BaseHTTPRequestHandler):
    models = b""

    def do_GET(self) -> None:
        wanted = self.headers["Authorization"] == "Bearer sk-1"
        self.send_response(200 if wanted else 401)
        self.end_headers()
        self.wfile.write(self.models if wanted else b"{}")

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def gateway(models: Sequence[Mapping[str, str]] = MODELS) -> Iterator[str]:
    answers = type("Answers", (Gateway,), {"models": json.dumps({"data": models}).encode()})
    with HTTPServer(("127.0.0.1", 0), answers) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_is_told_where_what_and_by_which_key(tool: str) -> None:
    with gateway() as url:
        done = invoke("config", "tool", tool, "--url", url, "--key", "sk-1")
    assert done.returncode == 0 and "then: " in done.stderr
    assert url.removesuffix("/v1") in done.stdout and "sk-1" in done.stdout
    assert "friends" in done.stdout or tool == "open-webui", "that one asks for the models itself"
    if TOOLS[tool].file.suffix == ".json":
        json.loads(done.stdout)


def test_encoders_are_for_tools_that_embed() -> None:
    with gateway([*ENCODERS, *MODELS]) as url:
        told = {
            tool: invoke("config", "tool", tool, "--url", url, "--key", "sk-1").stdout for tool in ("aider", "continue")
        }
    assert "openai/friends" in told["aider"] and "vectors" not in told["aider"]
    assert 'model: "vectors"' in told["continue"] and "roles: [embed]" in told["continue"]
    assert "classes" not in told["continue"]
    with gateway(ENCODERS) as url:
        assert_clear(
            invoke("config", "tool", "aider", "--url", url, "--key", "sk-1"), 1, "no model that generates text"
        )
        assert "mode: embedding" in invoke("config", "tool", "litellm", "--url", url, "--key", "sk-1").stdout
    with gateway([]) as url:
        assert_clear(invoke("config", "tool", "litellm", "--url", url, "--key", "sk-1"), 1, "no model")


def test_a_file_is_written_once_and_for_its_owner(tmp_path: Path) -> None:
    asked = ("config", "tool", "aider", "--write", "--model", "friends")
    done = invoke(*asked, cwd=tmp_path)
    file = tmp_path / ".aider.conf.yml"
    assert done.returncode == 0 and "openai/friends" in file.read_text() and file.stat().st_mode & 0o777 == 0o600
    file.write_text("mine")
    assert_clear(invoke(*asked, cwd=tmp_path), 1, "already exists")
    assert file.read_text() == "mine"


def test_what_cannot_be_is_told() -> None:
    assert_clear(invoke("config", "tool", "emacs"), 2, "unknown", "open-webui")
    assert_clear(invoke("config", "tool", "aider", "--url", "localhost:8000"), 2, "http://")
    assert_clear(invoke("config", "tool", "aider", "--url", "http://127.0.0.1:9/v1"), 1, "no API answers", "serve")
    with gateway() as url:
        assert_clear(invoke("config", "tool", "aider", "--url", url), 1, "needs a key")


CHARACTERS = "abz019 \t~$`(){}[]<>|&;:#!*?@%^=+-_,./\\\\\"'é汉👩"  # what means something to shells, YAML and JSON


def hostile_names(count: int = 60) -> list[str]:
    """Names that a format could take for something else, and mixtures of their characters, the same ones at each run."""
    chosen = random.Random(7)
    known = [
        "$(touch pwned)",
        "`touch pwned`",
        "x; touch pwned",
        "a'$(touch pwned)'",
        "- x",
        "{a: b}",
        "&a",
        "*a",
        "!!int 1",
        "~",
    ]
    known += [
        "# no",
        "yes",
        "1e3",
        "%YAML",
        "a: b",
        "x #y",
        "\\\\x41",
        "$HOME",
        "!!",
        "~/x",
        "null",
        "'",
        '"',
        " a ",
        "=",
        "\\",
    ]
    mixed = ["".join(chosen.choices(CHARACTERS.replace("\t", ""), k=chosen.randint(1, 24))) for _ in range(count)]
    return [*known, *mixed]


def values_in(tool: str, text: str, folder: Path) -> list[str]:
    """The texts in a tool's file, as the parser of its format reads them."""
    if TOOLS[tool].file.suffix == ".env":
        names = [line.partition("=")[0] for line in text.splitlines()]
        shown = " ".join(f'"${{{name}}}"' for name in names)
        (folder / "x.env").write_text(text)
        script = f"set -a; . ./x.env; set +a; printf '%s\\0' {shown}"
        told = subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, timeout=20, check=True)
        assert not told.stderr and [path.name for path in folder.iterdir()] == ["x.env"], "a name was executed"
        return told.stdout.decode().split("\0")[:-1]
    content = json.loads(text) if TOOLS[tool].file.suffix == ".json" else yaml.safe_load(text)
    pending, found = [content], list[str]()
    while pending:
        value = pending.pop()
        pending += [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
        found += [value] if isinstance(value, str) else []
    return found


@pytest.mark.parametrize("tool", TOOLS)
def test_a_name_is_a_text_to_every_format(tool: str, tmp_path: Path) -> None:
    names = hostile_names(12 if TOOLS[tool].file.suffix == ".env" else 60)
    for name in names:
        endpoint = Endpoint(f"http://h/{name}/v1", [name], f"key {name}", embedders=[f"e {name}"])
        values = values_in(tool, TOOLS[tool].configuration(endpoint), tmp_path)
        assert f"key {name}" in values
        wanted = f"e {name}" if tool == "open-webui" else name
        assert {wanted, f"openai/{name}", f"swarmnode/{name}"} & set(values), (name, values)


@pytest.mark.parametrize("escape", ["\n", "\r", "\x00", "\x1b[2J", "\x85", "\u2028", "\u202e", "\ud800", "\x7f"])
def test_control_characters_are_refused(escape: str) -> None:
    for fields in (
        ("http://h", [f"a{escape}b"], "k"),
        ("http://h", ["a"], f"k{escape}"),
        (f"http://h{escape}", ["a"], "k"),
    ):
        with pytest.raises(UsageError, match="control characters"):
            Endpoint(*fields)
    with gateway([{"id": f"a{escape}b"}]) as url:
        assert_clear(invoke("config", "tool", "goose", "--url", url, "--key", "sk-1"), 2, "control characters")
