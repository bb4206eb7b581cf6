"""`swarmnode host`: what it founds, goes on with, and refuses."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from swarmnode.cli.host import host as command
from swarmnode.cli.terminal import process
from swarmnode.errors import ExecutorDied
from swarmnode.node.bootstrap import SwarmHost
from swarmnode.swarm.storage.swarmfile import load_swarm
from tests.cli.command import assert_clear, invoke
from tests.llama import save_llama

LOOPBACK = ("--listen", "/ip4/127.0.0.1/tcp/0")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model in it, and a host that says where it would stand instead of standing there."""
    save_llama(tmp_path / "tiny", 1, vocab_size=64, hidden_size=16, intermediate_size=32)

    async def run(self: SwarmHost, stop: Any, opened: Any) -> None:
        await opened(self._swarm, ["/ip4/127.0.0.1/tcp/9/p2p/12D3KooWGzxzKZYveHXtpG6AsrUJBcWxHBFS2HsEoGTxrMLvKXtf"])

    monkeypatch.setattr(SwarmHost, "run", run)
    monkeypatch.setattr(command, "TRY_S", 0.5)
    monkeypatch.setenv("SWARMNODE_OWNER_PASSWORD", "correct horse")
    monkeypatch.setenv("SWARMNODE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_one_command_founds_and_says_what_a_friend_types(folder: Path) -> None:
    done = invoke("host", "./tiny", "--private", "--uses", "3", "--expires", "7d", *LOOPBACK)
    assert done.returncode == 0, done.stderr
    assert "volunteer, 3 machines, for 7 days" in done.stdout and "swarmnode run swarm2" in done.stdout
    assert "does not answer from here" in done.stdout
    line = next(word for word in done.stdout.split() if word.startswith("swarm2"))
    assert load_swarm(line).id == load_swarm(folder / "tiny.swarm").id


def test_the_next_time_it_goes_on_with_the_same_swarm(folder: Path) -> None:
    assert invoke("host", "./tiny", *LOOPBACK).returncode == 0
    founded = load_swarm(folder / "tiny.swarm")
    for again in ("./tiny", "tiny.swarm"):
        assert invoke("host", again).returncode == 0
        assert load_swarm(folder / "tiny.swarm").bootstraps == founded.bootstraps
    save_llama(folder / "other", 1, vocab_size=64, hidden_size=16, intermediate_size=32)
    assert_clear(invoke("host", "./other", "--name", "tiny"), 2, "another model", "--name")
    assert_clear(invoke("host", "./tiny", *LOOPBACK), 2, "--listen")


def test_a_host_that_cannot_compute_any_more_begins_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Any] = []

    async def dies(self: SwarmHost, stop: Any, opened: Any) -> None:
        raise ExecutorDied("the compute thread died")

    def execv(_program: str, arguments: list[str]) -> None:
        begun.append(arguments)
        raise SystemExit(0)

    monkeypatch.setenv(process.COUNT, "")  # afterwards it is as before
    monkeypatch.delenv(process.COUNT)
    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setattr(process, "FIRST_PAUSE_S", 0.0)
    with monkeypatch.context() as dying:
        dying.setattr(SwarmHost, "run", dies)
        done = invoke("host", "./tiny", *LOOPBACK)
    assert (done.returncode, len(begun)) == (0, 1) and "Starting again" in done.stderr
    assert invoke("host", "./tiny", *LOOPBACK).returncode == 0, "the same command, whose swarm is founded already"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("./tiny", "--memory", "6"), ("6GB",)),
        (("./tiny", "--device", "gpu"), ("--device gpu",)),
        (("./tiny", "--expires", "soon"), ("not a duration",)),
        (("./tiny", "--listen", "4001"), ("not a multiaddr",)),
        (("./nowhere", *LOOPBACK), ("no such",)),
        (("nowhere.swarm",), ("no such file",)),
    ],
)
def test_nothing_is_left_of_what_cannot_be(folder: Path, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    assert_clear(invoke("host", *arguments, "--private"), 2, *words)
    assert sorted(path.name for path in folder.iterdir()) == ["tiny"]
