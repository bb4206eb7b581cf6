"""What comes through a pipe: which of it is an invite, which a prompt, and what is told where it is neither."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from swarmnode.cli.main import app
from swarmnode.cli.use.generate import _what_is_meant
from tests.cli.command import ROOT, invoke
from tests.swarm.storage.test_joined_swarms import FRIENDS

PROMPT = "Once upon\na time"


@pytest.mark.parametrize(
    ("arguments", "piped", "meant"),
    [
        (("", ""), PROMPT, ("", PROMPT)),
        (("-", ""), PROMPT, ("", PROMPT)),
        (("friends", ""), PROMPT, ("friends", PROMPT)),
        (("friends", "-"), PROMPT, ("friends", PROMPT)),
        (("-", "-"), f"{FRIENDS}\n{PROMPT}", (FRIENDS, PROMPT)),
        (("-", "text"), FRIENDS, (FRIENDS, "text")),
        (("friends", "text"), PROMPT, ("friends", "text")),
        (("text", ""), PROMPT, ("", "text")),
    ],
)
def test_a_pipe_is_the_prompt_unless_it_is_asked_for_the_swarm(
    arguments: tuple[str, str], piped: str, meant: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert invoke("join", FRIENDS, home=tmp_path).returncode == 0
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(f"{piped}\n".encode())))
    assert _what_is_meant(*arguments, "", tmp_path) == meant


def test_ids_are_not_looked_for_in_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(FRIENDS.encode())))
    assert _what_is_meant("-", "", "1,2", tmp_path) == (FRIENDS, "")


@pytest.mark.parametrize(
    ("command", "piped", "words"),
    [
        (("generate",), b"", "standard input was empty"),
        (("generate", "-"), b"\xff\xfe\n", "not UTF-8 text"),
        (("generate", "friends"), b"x" * ((1 << 24) + 1), "more than 16 MiB"),
        (("join", "-"), b"\x80", "not UTF-8 text"),
        (("join",), b"\n", "standard input was empty"),
        (("status", "-"), b"", "standard input was empty"),
    ],
)
def test_what_cannot_be_used_is_told(command: tuple[str, ...], piped: bytes, words: str, tmp_path: Path) -> None:
    invoke("join", FRIENDS, home=tmp_path)
    done = CliRunner().invoke(app, command, input=piped, env={"SWARMNODE_HOME": str(tmp_path)})
    assert done.exit_code == 2 and words in done.stderr and "Traceback" not in done.stderr


def test_a_process_without_standard_streams(tmp_path: Path) -> None:
    """As some supervisors start it."""
    command = f"cd {ROOT} && exec {sys.executable} -m swarmnode.cli.main join --home {tmp_path} <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", command], check=False).returncode == 2
