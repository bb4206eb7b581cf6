"""A swarm of real processes on this machine's loopback, for the demo, the tests and the benchmarks.

Each member is a `swarmnode` command with its own home and its own p2pd. `NodeProcess` reads the JSON lines that it prints.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

from swarmnode.errors import LocalError
from swarmnode.net.libp2p.daemon import die_with_parent

# A process that ends is noticed at once, a slow one is not: the time covers a machine busy with other work.
START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 60.0
LOG = "log.txt"  # in a member's home
if sys.platform == "win32":  # it has neither signal, and no p2pd
    KILL = CONTINUE = signal.SIGTERM
else:
    KILL, CONTINUE = signal.SIGKILL, signal.SIGCONT


class Process(Protocol):
    """Interface to the process of a member: the part of `subprocess.Popen` that `NodeProcess` uses."""

    pid: int
    stdout: IO[bytes] | None
    returncode: int | Any

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, sig: int) -> None: ...


class NodeProcess:
    """A running `swarmnode` command and the events that it has printed."""

    def __init__(self, name: str, process: Process, home: Path) -> None:
        self.name = name
        self.process = process
        self.home = home
        self.log = home / LOG
        self.seen: list[dict[str, Any]] = []
        self._events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, name=f"events of {name}", daemon=True).start()

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self.process.pid

    @property
    def peer(self) -> str:
        """Peer id of the member; waits until it has joined. Raises LocalError if it ends first or does not join in time."""
        return str(self.wait_for("joined")["peer"])

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict):
                self._events.put(event)
        self._events.put(None)

    def wait_for(self, event: str, timeout_s: float = START_TIMEOUT_S) -> dict[str, Any]:
        """Return the first event named `event`, printed already or within `timeout_s` seconds. Raises LocalError if the member ends
        first or the time runs out."""
        return self.wait_until(lambda item: item.get("event") == event, f"'{event}'", timeout_s)

    def wait_until(
        self, holds: Callable[[dict[str, Any]], bool], what: str, timeout_s: float = START_TIMEOUT_S
    ) -> dict[str, Any]:
        """Return the first event that `holds`, printed already or within `timeout_s` seconds; `what` names it in errors.

        Raises LocalError if the member ends first or the time runs out.
        """
        for past in self.seen:
            if holds(past):
                return past
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                item = self._events.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                raise LocalError(f"{self.name}: no {what} within {timeout_s:.0f} s; its log: {self.tail()}") from None
            if item is None:
                self._events.put(None)
                raise LocalError(f"{self.name} ended with code {self.process.wait()} before {what}: {self.tail()}")
            self.seen.append(item)
            if holds(item):
                return item

    def finish(self, timeout_s: float) -> int:
        """Wait until the process ends and return its exit code. Raises subprocess.TimeoutExpired after `timeout_s` seconds."""
        return self.process.wait(timeout_s)

    def tail(self, characters: int = 2000) -> str:
        """Return the last `characters` of the member's log; "(empty)" if there are none."""
        return self.log.read_text(errors="replace")[-characters:].strip() or "(empty)"

    def kill(self, number: int = KILL) -> None:
        """Send the signal `number` (default SIGKILL) if the process still runs."""
        if self.process.poll() is None:
            self.process.send_signal(number)

    def stop(self) -> None:
        """Stop the process: SIGTERM, then SIGKILL if it has not ended after STOP_TIMEOUT_S seconds."""
        self.kill(CONTINUE)
        self.kill(signal.SIGTERM)
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            self.process.wait()


class LocalSwarm:
    """A swarm file, its bootstrap peer and its nodes: `with LocalSwarm(folder) as swarm: ...` stops all of them on exit."""

    def __init__(self, folder: Path, *, threads_per_process: int = 1) -> None:
        self.folder = folder
        self.members: list[NodeProcess] = []
        self.file = folder / "local.swarm"
        self.environment = {
            # These variables give one node its address for metrics; several nodes would collide there.
            **{name: value for name, value in os.environ.items() if not name.startswith("SWARMNODE_METRICS_")},
            "OMP_NUM_THREADS": str(threads_per_process),
            "PYTHONUNBUFFERED": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }

    def __enter__(self) -> LocalSwarm:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def create(self, model: Path, *extra: str, membership: str = "open") -> str:
        """Create a swarm for the checkpoint `model` (`--mode train` to train it) and return its invite, empty for a private swarm.
        Raises LocalError if that fails, subprocess.TimeoutExpired after START_TIMEOUT_S seconds."""
        options = ("--model", str(model), f"--{membership}", "--quiet", *extra)
        return self.command("create", str(self.file.with_suffix("")), *options).strip()

    def command(self, *arguments: str, timeout_s: float = START_TIMEOUT_S, inside: Sequence[str] = ()) -> str:
        """Run a `swarmnode` command to its end and return what it printed. Raises LocalError if it fails, subprocess.TimeoutExpired
        after `timeout_s` seconds.

        `inside` goes before the command, to run it in a network namespace, for example.
        """
        done = subprocess.run(
            [*inside, sys.executable, "-m", "swarmnode.cli.main", *arguments],
            capture_output=True,
            text=True,
            env={**self.environment, "SWARMNODE_HOME": str(self.folder / "client")},
            timeout=timeout_s,
            preexec_fn=die_with_parent,
        )
        if done.returncode != 0:
            raise LocalError(
                f"swarmnode {' '.join(arguments)} ended with code {done.returncode}: {done.stderr.strip()}"
            )
        return done.stdout

    def bootstrap(self, *extra: str, inside: Sequence[str] = (), name: str = "bootstrap") -> NodeProcess:
        """Start a bootstrap peer and wait until it has joined. Raises LocalError if it ends first or does not join in time."""
        member = self.start(name, ["host", "--door-only", str(self.file), "--json", *extra], inside)
        member.wait_for("joined")
        return member

    def node(self, name: str, *extra: str, swarm: str | None = None, inside: Sequence[str] = ()) -> NodeProcess:
        """Start a volunteer's node without waiting; it joins with `swarm`, by default this swarm's file."""
        arguments = ["run", swarm or str(self.file), "--json", "--name", name, *extra]
        return self.start(name, arguments, inside)

    def trainer(self, name: str, *extra: str, inside: Sequence[str] = ()) -> NodeProcess:
        """Start a process that trains the swarm, without waiting for it."""
        return self.start(name, ["train", str(self.file), "--json", *extra], inside)

    def server(self, name: str, *extra: str) -> NodeProcess:
        """Start a gateway to the swarm without waiting."""
        return self.start(name, ["serve", str(self.file), "--json", *extra])

    def start(self, name: str, arguments: Sequence[str], inside: Sequence[str] = ()) -> NodeProcess:
        """Start a command that runs until it is stopped, with a home of its own, without waiting."""
        home = self.folder / "homes" / name
        home.mkdir(parents=True, exist_ok=True)
        process = self._launch([*arguments, "--home", str(home)], home / LOG, inside)
        member = NodeProcess(name, process, home)
        self.members.append(member)
        return member

    def _launch(self, arguments: Sequence[str], log: Path, inside: Sequence[str]) -> Process:
        with log.open("ab") as errors:
            return subprocess.Popen(
                [*inside, sys.executable, "-m", "swarmnode.cli.main", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=self.environment,
                start_new_session=True,  # a Ctrl-C at the terminal is for the parent to pass on
                preexec_fn=die_with_parent,
            )

    def stop(self) -> None:
        """Stop all members at the same time."""
        for member in self.members:
            member.kill(CONTINUE)
            member.kill(signal.SIGTERM)
        for member in self.members:
            member.stop()
