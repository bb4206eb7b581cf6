"""Container: runs a root in separate namespaces. Needs Linux and root.

It has the parts that matter to a node: separate processes (the entry point is number 1), a separate network with nothing but
loopback, and the image's user, environment and folder. It has no layers, limits or seccomp, which an engine adds.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from root import Root


class Container:
    """Process started in a root as an engine would start it, in separate namespaces. With `beside` it shares that container's
    network."""

    def __init__(
        self,
        root: Root,
        words: Sequence[str],
        *,
        beside: Container | None = None,
        output: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._root = root
        self._environment = dict(environment or {})
        prepare = (
            f'mount -t tmpfs shm {root.folder}/dev/shm && {"true" if beside else "ip link set lo up"} && exec "$@"'
        )
        network = ["nsenter", f"--net=/proc/{beside.pid}/ns/net"] if beside else []
        namespaces = ["--pid", "--ipc", "--uts", f"--mount-proc={root.folder}/proc", *([] if beside else ["--net"])]
        self.process = subprocess.Popen(
            [
                *network,
                *("unshare", *namespaces, "--fork", "--kill-child"),
                *("sh", "-c", prepare, "sh", *root.command([*root.entrypoint, *words], **self._environment)),
            ],
            stdout=output,
            text=True,
        )
        self.pid = self._first_process()

    def __enter__(self) -> Container:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def __repr__(self) -> str:
        return f"<Container of {self._root!r} {self.process.poll()}>"

    def execute(self, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run `words` beside the first process, in its environment, and return the completed process with its output."""
        entered = ["nsenter", f"--target={self.pid}", "--mount", "--pid", "--net", "--ipc", "--uts"]
        return subprocess.run(
            [*entered, *self._root.command(words, **self._environment)], capture_output=True, text=True, timeout=120
        )

    def _first_process(self) -> int:
        """Wait until `unshare` has forked the container's first process and return its process id on this machine. Raises
        AssertionError if the container ends before."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        while not (numbers := children.read_text().split()):
            assert self.process.poll() is None, f"{self!r} has not come to life"
            time.sleep(0.01)
        return int(numbers[0])

    def healthy(self) -> bool:
        """Run the image's health check and return whether it succeeds."""
        return self.execute(self._root.health).returncode == 0

    def signal(self, number: int) -> None:
        """Send signal `number` to the first process, as `docker stop` does."""
        os.kill(self.pid, number)
