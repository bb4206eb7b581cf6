"""A real pseudo-terminal that closes under a node: it leaves in order, unless it has none or nohup told it to stay."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarmnode.lending.control import running_nodes, tell_node
from swarmnode.localswarm import START_TIMEOUT_S, STOP_TIMEOUT_S
from tests.cli.command import ROOT, invoke
from tests.real.forked import ForkedSwarm
from tests.tiny import TinyModel

STAYS_S = 3.0


@pytest.fixture(scope="module")
def founded(tiny: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedSwarm]:
    with ForkedSwarm(tmp_path_factory.mktemp("terminal")) as local:
        local.create(tiny.folder)
        local.bootstrap()
        yield local


class Terminal:
    """A pseudo-terminal, and a session of which it is the controlling one, with a program in its foreground."""

    def __init__(self, *arguments: str, home: Path, nohup: bool = False) -> None:
        self._master, slave = os.openpty()
        self.log = home / "errors"

        def begin() -> None:
            os.setsid()
            fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
            signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)  # whatever the tests run under

        with self.log.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "swarmnode.cli.main", *arguments, "--home", str(home)],
                stdin=slave,
                stdout=slave,
                stderr=errors,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
                preexec_fn=begin,
            )
        os.close(slave)

    def close(self) -> None:
        """Close the window: the kernel hangs the session up."""
        os.close(self._master)


def wait_for_node(home: Path, process: subprocess.Popen[bytes]) -> Path:
    until_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < until_s and process.poll() is None:
        for path in running_nodes(home).values():
            if (answer := tell_node(path, "state")) is not None and answer["state"] == "running":
                return path
        time.sleep(0.1)
    raise AssertionError(f"no node is there, exit code {process.poll()}")


@pytest.mark.parametrize("nohup", [False, True])
def test_a_terminal_that_closes(founded: ForkedSwarm, tmp_path: Path, nohup: bool) -> None:
    terminal = Terminal("run", str(founded.file), "--device", "cpu", "--verbose", home=tmp_path, nohup=nohup)
    process = terminal.process
    try:
        path = wait_for_node(tmp_path, process)
        if not nohup:
            # What the shell sends to its jobs, before the kernel's own.
            process.send_signal(signal.SIGHUP)
        terminal.close()
        if nohup:
            time.sleep(STAYS_S)
            assert process.poll() is None and (tell_node(path, "state") or {})["state"] == "running"
            process.terminate()
        assert process.wait(STOP_TIMEOUT_S) == 0, terminal.log.read_text()
        assert "Traceback" not in terminal.log.read_text() and not path.exists()
    finally:
        process.kill()


def test_without_a_terminal_the_options_are_read_again(founded: ForkedSwarm) -> None:
    home = founded.folder / "homes" / "service"
    home.mkdir(parents=True)
    (home / "node.toml").write_text('max_upload = "4Mbit"\n')
    member = founded.node("service", "--device", "cpu")
    member.wait_for("ready")
    (home / "node.toml").write_text('max_upload = "8Mbit"\n')
    member.kill(signal.SIGHUP)
    deadline_s = time.monotonic() + STAYS_S * 10
    while "the options were read again" not in member.tail() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert "the options were read again" in member.tail() and member.process.poll() is None
    (home / "node.toml").write_text('max_upload = "8Mbit"\nthreads = 3\n')
    done = invoke("config", "reload", home=home)
    assert "the options were read again; restart the node for threads" in done.stdout
    (home / "node.toml").write_text('max_uplaod = "8Mbit"\n')
    assert invoke("config", "reload", home=home).returncode == 1
    assert member.process.poll() is None
    member.stop()
