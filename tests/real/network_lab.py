"""Places of a network of one's own, out of network namespaces.

A namespace has no name but belongs to a process that holds it and dies with us, so nothing is left behind, however we end. Needs
root, iproute2 and util-linux.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TypeVar

from swarmnode.net.libp2p.daemon import die_with_parent

Lab = TypeVar("Lab", bound="NetworkLab")
HOLD = ("sh", "-c", "echo held; exec sleep infinity")


@functools.cache
def program(name: str) -> str | None:
    """Where a program is, the administrator's included: users' PATH often lacks their folders."""
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")


def _known(name: str) -> str:
    return program(name) or name


@contextlib.contextmanager
def child(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that ends with the block, or with us."""
    started = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, preexec_fn=die_with_parent
    )
    with started:
        try:
            yield started
        finally:
            started.kill()


class NetworkLab(ABC):
    """`with` it there are its places; `holders` are the processes that keep them, by place."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self.holders: dict[str, int] = {}  # pids

    @abstractmethod
    def _build(self) -> None:
        """All places, and what joins them. Raises OSError, CalledProcessError."""

    def __enter__(self: Lab) -> Lab:
        try:
            self._build()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def inside(self, place: str) -> list[str]:
        """What to put before a command that is to run at a place."""
        return [_known("nsenter"), f"--target={self.holders[place]}", "--net", "--"]

    def _hold(self, place: str) -> None:
        """A new place: a namespace with a process that keeps it."""
        holder = self._started([_known("unshare"), "--net", "--", *HOLD], "held")
        if holder is None:
            raise OSError("network namespaces are not permitted")
        self.holders[place] = holder
        self._ip(place, "link set lo up")

    def _started(self, command: Sequence[str], word: str) -> int | None:
        """A process that ends with the lab, and says this word once it is ready; its pid, None where it says something else."""
        process = self._stack.enter_context(child(command))
        assert process.stdout is not None
        return process.pid if process.stdout.readline() == f"{word}\n" else None

    def _ip(self, place: str, arguments: str) -> str:
        return self._run(place, "ip", *arguments.split())

    def _run(self, place: str, name: str, *arguments: str, text: str | None = None) -> str:
        """What a command printed at a place. Raises CalledProcessError."""
        command = [*self.inside(place), _known(name), *arguments]
        return subprocess.run(command, input=text, check=True, capture_output=True, text=True).stdout
