"""A node in the background: what every manager of services is told of it, and where its files lie."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from swarmnode.cli.terminal.console import fail

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Service:
    """A node of a swarm that was joined. `options` are those of `swarmnode run` but for the `home`, which is None where it is the
    usual one; `node` is what the node is called, where it is not as the swarm."""

    name: str
    options: tuple[str, ...] = ()
    home: Path | None = None
    node: str = ""

    @property
    def swarm(self) -> Path:
        """The invite, or the founder's file."""
        return config_folder("swarmnode") / f"{self.name}.swarm"

    @property
    def all_options(self) -> list[str]:
        """Of `swarmnode run`."""
        return [*self.options, *self._home]

    @property
    def command(self) -> list[str]:
        """What is to run."""
        return [*program(), "run", str(self.swarm), "--json", *self.all_options]

    @property
    def stop_command(self) -> list[str]:
        """What lets it leave in order."""
        return [*program(), "stop", self.node or self.name, *self._home]

    @property
    def _home(self) -> list[str]:
        return [] if self.home is None else ["--home", str(self.home)]


class ServiceManager(Protocol):
    """What starts services on a system, and keeps them going."""

    def write(self, service: Service) -> list[Path]:
        """Write down what it needs beside the swarm; the files."""
        ...

    def start(self, service: Service) -> str:
        """Start it, now and whenever the user logs in; what is good to know then."""
        ...

    def status(self, name: str) -> int:
        """Print how it is; the exit code."""
        ...

    def logs(self, name: str, *, follow: bool) -> int:
        """Print what it has said; the exit code."""
        ...

    def remove(self, name: str) -> None:
        """Stop it, and remove what was written."""
        ...


def program() -> list[str]:
    """How this swarmnode is started."""
    found = shutil.which("swarmnode")
    return [found] if found is not None else [sys.executable, "-m", "swarmnode.cli.main"]


def config_folder(kind: str) -> Path:
    """The user's, by the rules of the desktop."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / kind


def call(command: str, *arguments: str, endless: bool = False) -> int:
    """Run a program of the system to its end; its exit code."""
    if shutil.which(command) is None:
        fail(f"no {command} on this machine: services need it")
    return subprocess.run([command, *arguments], timeout=None if endless else TIMEOUT_S, check=False).returncode


def call_well(command: str, *arguments: str) -> None:
    """The same of one that has to succeed."""
    if call(command, *arguments):
        fail(f"{command} {shlex.join(arguments)} did not succeed")


def show_log(path: Path, *, follow: bool) -> int:
    """The end of a file, and with `follow` what comes."""
    return call("tail", "-n", "100", *(["-f"] if follow else []), str(path), endless=follow)
