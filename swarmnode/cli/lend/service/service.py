"""Service of a node in the background: its command and files, and the interface of service managers."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from swarmnode.terminal.console import fail

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Service:
    """Service of a node. `name` is that of a joined swarm, `options` are those of `swarmnode run` except `home`, which is None for
    the default folder. `node` is the node's own name, empty if it has none."""

    name: str
    options: tuple[str, ...] = ()
    home: Path | None = None
    node: str = ""

    @property
    def swarm(self) -> Path:
        """Path of the file with the invite, or of the link to the founder's .swarm file."""
        return config_folder("swarmnode") / f"{self.name}.swarm"

    @property
    def all_options(self) -> list[str]:
        """All options of `swarmnode run`, including --home."""
        return [*self.options, *self._home]

    @property
    def command(self) -> list[str]:
        """Command that runs the node."""
        return [*program(), "run", str(self.swarm), "--json", *self.all_options]

    @property
    def stop_command(self) -> list[str]:
        """Command that lets the node leave its swarm in order."""
        return [*program(), "stop", self.node or self.name, *self._home]

    @property
    def _home(self) -> list[str]:
        return [] if self.home is None else ["--home", str(self.home)]


class ServiceManager(Protocol):
    """Service manager of an operating system: starts services and keeps them running."""

    def write(self, service: Service) -> list[Path]:
        """Write the files that the manager needs, except the swarm's file.

        Args:
            service: The service to install.

        Returns:
            The paths of the written files.
        """
        ...

    def start(self, service: Service) -> str:
        """Start the service now and whenever the user logs in.

        Returns:
            A sentence for the user, about the log or about running while logged out.
        """
        ...

    def start_commands(self, service: Service) -> list[list[str]]:
        """Return the commands that start a written service, each as its words."""
        ...

    def status(self, name: str) -> int:
        """Print the state of the service called `name`.

        Returns:
            The exit code of the system's program.
        """
        ...

    def logs(self, name: str, *, follow: bool) -> int:
        """Print the log of the service called `name`.

        Args:
            name: The service's name.
            follow: Whether to keep printing new lines.

        Returns:
            The exit code of the system's program.
        """
        ...

    def remove(self, name: str) -> None:
        """Stop the service called `name`, and remove its files that no other service uses, even if the manager does not answer."""
        ...


def program() -> list[str]:
    """Return the command that starts this swarmnode."""
    found = shutil.which("swarmnode")
    return [found] if found is not None else [sys.executable, "-m", "swarmnode.cli.main"]


def config_folder(kind: str) -> Path:
    """Return the folder `kind` in the user's folder of configuration (XDG_CONFIG_HOME, or ~/.config)."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / kind


def call(command: str, *arguments: str, endless: bool = False) -> int:
    """Run a program of the system until it ends and return its exit code. `endless` turns the time limit off. Ends the command if
    the program is missing."""
    code = try_call(command, *arguments, endless=endless)
    return code if code is not None else fail(f"{command} is missing on this machine: install it; services need it")


def try_call(command: str, *arguments: str, endless: bool = False) -> int | None:
    """Run a program of the system as `call` does and return its exit code; None if the program is missing."""
    if shutil.which(command) is None:
        return None
    return subprocess.run([command, *arguments], timeout=None if endless else TIMEOUT_S, check=False).returncode


def call_well(command: str, *arguments: str) -> None:
    """Run a program of the system; end the command if it fails."""
    if call(command, *arguments):
        fail(f"`{command} {shlex.join(arguments)}` failed: see its message above")


def remove_files(*paths: Path) -> None:
    """Remove the files that exist."""
    for path in paths:
        path.unlink(missing_ok=True)


def show_log(path: Path, *, follow: bool) -> int:
    """Print the last 100 lines of a file, with `follow` also new ones, and return the exit code."""
    return call("tail", "-n", "100", *(["-f"] if follow else []), str(path), endless=follow)
