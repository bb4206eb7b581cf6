"""Real swarms whose members start in a tenth of the time: forked from a process that has imported what they import.

Everything else is as with `LocalSwarm`: processes of their own, with homes, sockets and p2pds of their own, that die by signals.
What Python does before a command's first line is for tests that start commands: `test_weights`, `test_two_friends`, `test_demo`,
and those of the command line.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from typer.testing import CliRunner

from swarmnode.cli.main import app
from swarmnode.errors import LocalError
from swarmnode.localswarm import START_TIMEOUT_S, LocalSwarm, Process
from swarmnode.net.libp2p.daemon import die_with_parent

IMPORTED = (
    "swarmnode.cli.lend.run",
    "swarmnode.cli.host.host",
    "swarmnode.client.swarm_client",
    "swarmnode.node.node",
    "swarmnode.serving.serving_stage",
    "swarmnode.net.libp2p.engine",
)

NETWORK = 0x40000000  # CLONE_NEWNET, the kind of namespace that setns enters

forkserver = multiprocessing.get_context("forkserver")
forkserver.set_forkserver_preload(list(IMPORTED))


class ForkedSwarm(LocalSwarm):
    """A local swarm of forked members, founded by this process."""

    def create(self, model: Path, *extra: str, membership: str = "open") -> str:
        options = ["--model", str(model), f"--{membership}", "--quiet", *extra]
        arguments = ["create", str(self.file.with_suffix("")), *options]
        result = CliRunner().invoke(
            app, arguments, env={**self.environment, "SWARMNODE_HOME": str(self.folder / "client")}
        )
        if result.exit_code:
            raise LocalError(f"swarmnode create ended with code {result.exit_code}: {result.stderr.strip()}")
        return result.stdout.strip()

    def command(self, *arguments: str, timeout_s: float = START_TIMEOUT_S, inside: Sequence[str] = ()) -> str:
        if not _can_fork(inside):
            return super().command(*arguments, timeout_s=timeout_s, inside=inside)
        environment = {**self.environment, "SWARMNODE_HOME": str(self.folder / "client")}
        done = run_command(arguments, environment, timeout_s, inside)
        if done.returncode:
            told = f"swarmnode {' '.join(arguments)} ended with code {done.returncode}: {done.stderr.strip()}"
            raise LocalError(told)
        return done.stdout

    def _launch(self, arguments: Sequence[str], log: Path, inside: Sequence[str]) -> Process:
        if not _can_fork(inside):
            return super()._launch(arguments, log, inside)
        return ForkedProcess(arguments, log, self.environment, inside)


def run_command(
    arguments: Sequence[str],
    environment: dict[str, str],
    timeout_s: float = START_TIMEOUT_S,
    inside: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:
    """Run a forked command to its end. Raises TimeoutExpired."""
    with tempfile.NamedTemporaryFile() as errors:
        process = ForkedProcess(arguments, Path(errors.name), environment, inside)
        late = threading.Timer(timeout_s, process.send_signal, [signal.SIGKILL])
        late.start()
        assert process.stdout is not None
        with process.stdout:
            printed = process.stdout.read().decode()
        code = process.wait()
        late.cancel()
        if code == -signal.SIGKILL:
            raise subprocess.TimeoutExpired(["swarmnode", *arguments], timeout_s)
        return subprocess.CompletedProcess(arguments, code, printed, errors.read().decode())


def _can_fork(inside: Sequence[str]) -> bool:
    """Whether nothing goes before a command, or only the way into a network's namespace (`network_lab.py`)."""
    return not inside or Path(inside[0]).name == "nsenter"


class ForkedProcess:
    """One command, as `subprocess.Popen` would have it."""

    def __init__(
        self, arguments: Sequence[str], log: Path, environment: dict[str, str], inside: Sequence[str] = ()
    ) -> None:
        output, theirs = forkserver.Pipe(duplex=False)
        given = (list(arguments), log, environment, theirs, list(inside))
        self._process = forkserver.Process(target=_run, args=given, daemon=True)
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        self.stdout: IO[bytes] | None = os.fdopen(os.dup(output.fileno()), "rb")
        self.returncode: int | Any = None
        output.close()

    def __repr__(self) -> str:
        return f"<ForkedProcess {self.pid}>"

    def poll(self) -> int | None:
        """Its exit code, or minus the signal that ended it; None while it runs."""
        self.returncode = self._process.exitcode
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """For its end. Raises TimeoutExpired."""
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("swarmnode", timeout or 0.0)
        return code

    def send_signal(self, sig: int) -> None:
        """Where it is there still."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, sig)


def _run(
    arguments: list[str], log: Path, environment: dict[str, str], output: Connection, inside: Sequence[str]
) -> None:
    """In the new process: the command, whose output others read."""
    die_with_parent()
    if inside:
        _, holder, *_ = inside  # nsenter --target=PID
        with Path(f"/proc/{holder.partition('=')[2]}/ns/net").open("rb") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), NETWORK):
                raise OSError(ctypes.get_errno(), f"{holder} cannot be entered")
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
    with log.open("ab") as errors, Path(os.devnull).open("rb") as nothing:
        for file, number in ((nothing, 0), (output, 1), (errors, 2)):
            os.dup2(file.fileno(), number)
    output.close()
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["swarmnode", *arguments]
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode, 1) for number, mode in enumerate("rww"))
    app()
