"""`swarmnode chat` as people use it: in a pipe, and in a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from swarmnode.terminal.formatting import printable
from tests.cli.command import ROOT, TIMEOUT_S, assert_clear
from tests.gateway.speaking import save_speaking_llama
from tests.real.forked import ForkedSwarm

MESSAGE = "How are\nthe hens?"
END = 4  # the token that ends an answer


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedSwarm]:
    folder = tmp_path_factory.mktemp("talking")
    save_speaking_llama(folder / "model", max_position_embeddings=1 << 16)
    with ForkedSwarm(folder) as local:
        local.create(folder / "model")
        local.bootstrap()
        local.node("anna", "--name", "anna").wait_for("ready")
        yield local


def command(local: ForkedSwarm, *arguments: str) -> list[str]:
    swarm, home = str(local.file), str(local.folder / "homes" / "talker")
    chat = ["-m", "swarmnode.cli.main", "chat", swarm, "--home", home, *arguments]
    return [sys.executable, *chat, "--temperature", "0", "--logit-bias", f"{END}=-100"]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def piped(local: ForkedSwarm, given: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(local, *arguments), input=given, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment()
    )


def test_a_pipe_is_one_message_and_only_the_answer_is_printed(local: ForkedSwarm) -> None:
    plain, told = piped(local, f"{MESSAGE}\n", "-n", "12"), piped(local, MESSAGE, "-n", "12", "--json")
    answer = json.loads(told.stdout)
    assert plain.stdout == f"{printable(answer['text'])}\n" and len(answer["ids"]) == 12 and answer["tokens_per_s"] > 0
    assert (plain.returncode, plain.stderr, told.stderr) == (0, "", "")
    assert_clear(piped(local, MESSAGE, "-n", "70000"), 2, "tokens", "65536")
    assert_clear(piped(local, "\n"), 2, "standard input was empty")


def test_ctrl_c_stops_an_answer_and_the_next_one_ends_the_chat(local: ForkedSwarm) -> None:
    process, terminal = pty.fork()
    if process == 0:
        os.execve(sys.executable, command(local, "-n", "60000"), environment())
    try:
        read_until(terminal, rb"or /bye ends.\r\n> $")
        os.write(terminal, b"hens\n")
        read_until(terminal, rb"[^\x1b]{200}")  # of the answer: lines that change are shorter
        os.write(terminal, b"\x03")
        told = read_until(terminal, rb"]\r\n> $").decode()
        assert re.search(r"\[[\d.]+ tokens/s, written by anna\]\r\n> $", told), told
        os.write(terminal, b"\x03")
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    finally:
        os.close(terminal)


def read_until(terminal: int, pattern: bytes) -> bytes:
    until_s, read = time.monotonic() + TIMEOUT_S, b""
    while not re.search(pattern, read):
        ready, _, _ = select.select([terminal], [], [], max(0.0, until_s - time.monotonic()))
        assert ready, read
        read += os.read(terminal, 4096)
    return read
