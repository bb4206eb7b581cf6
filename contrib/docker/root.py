"""A folder as the root of a container: built by a Dockerfile's steps, run in namespaces of its own. Linux, as root.

What an engine adds is left out: layers, limits, seccomp. What matters to a node is there: its own processes (the entry point
is number 1), its own network with nothing but loopback, the image's user, environment and folder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from dockerfile import Ignore, Instruction, Stage, expand

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # of every image that says nothing else


@dataclass
class Root:
    """`folder` holds the files; the rest is what an image's configuration says."""

    folder: Path
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": PATH})
    user: str = "root"
    workdir: str = "/"
    entrypoint: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"<Root {self.folder} {self.user} {' '.join(self.entrypoint)}>"

    def inside(self, path: str) -> Path:
        """Where a path of the container lies."""
        return self.folder / (PurePosixPath(self.workdir) / path).relative_to("/")

    def command(self, words: Sequence[str], **environment: str) -> list[str]:
        """The words that run `words` in this root; each word hands its process on to the next, so no number changes."""
        variables = [f"{name}={value}" for name, value in {**self.environment, **environment}.items()]
        entered = ["chroot", f"--userspec={self.user}", str(self.folder)]
        return [*entered, "env", "--ignore-environment", f"--chdir={self.workdir}", *variables, *words]


class Builder:
    """Carries out the instructions of one stage in a root that holds its base."""

    def __init__(
        self,
        root: Root,
        context: Path,
        earlier: Mapping[str, Root],
        arguments: Mapping[str, str],
        host: Mapping[str, str],
    ) -> None:
        """`arguments` are --build-arg, `host` the variables that RUN sees besides: where this machine's packages are."""
        self._root = root
        self._context = context
        self._earlier = earlier
        self._arguments = arguments
        self._host = host
        self._set: dict[str, str] = {}
        self._ignore = Ignore((context / ".dockerignore").read_text())

    def __repr__(self) -> str:
        return f"<Builder of {self._root!r}>"

    def build(self, stage: Stage, *, files: bool = True) -> Root:
        """All steps; without `files` only those that configure, where the files are there from an earlier build.

        Raises CalledProcessError where a RUN fails, KeyError for an instruction that is not known here.
        """
        steps = {
            "ARG": self._arg,
            "COPY": self._copy,
            "ENV": self._env,
            "RUN": self._run,
            "USER": self._user,
            "WORKDIR": self._workdir,
            "ENTRYPOINT": self._entrypoint,
            "HEALTHCHECK": self._healthcheck,
            "CMD": lambda instruction: None,  # what is run is said at each start
            "VOLUME": lambda instruction: None,  # a folder like others, here
        }
        for instruction in stage.instructions:
            if files or instruction.keyword not in ("COPY", "RUN"):
                print(f"--- {instruction.keyword} {instruction.text[:100]}", flush=True)
                steps[instruction.keyword](instruction)
        return self._root

    def _variables(self) -> dict[str, str]:
        return {**self._root.environment, **self._set}

    def _arg(self, instruction: Instruction) -> None:
        for name, default in instruction.pairs.items():
            self._set[name] = self._arguments.get(name, default)

    def _env(self, instruction: Instruction) -> None:
        known = self._variables()  # as an engine: values of before this line
        self._root.environment.update({name: expand(value, known) for name, value in instruction.pairs.items()})

    def _user(self, instruction: Instruction) -> None:
        self._root.user = instruction.text

    def _workdir(self, instruction: Instruction) -> None:
        self._root.workdir = str(PurePosixPath(self._root.workdir) / expand(instruction.text, self._variables()))
        self._root.inside(".").mkdir(parents=True, exist_ok=True)

    def _entrypoint(self, instruction: Instruction) -> None:
        self._root.entrypoint = instruction.words

    def _healthcheck(self, instruction: Instruction) -> None:
        self._root.health = Instruction("CMD", instruction.text.removeprefix("CMD").strip()).words

    def _run(self, instruction: Instruction) -> None:
        command = self._root.command(["sh", "-c", instruction.text], **self._set, **self._host)
        with mounted(self._root.folder):
            subprocess.run(command, check=True)

    def _copy(self, instruction: Instruction) -> None:
        *sources, target = (expand(word, self._variables()) for word in instruction.words)
        stage = instruction.flag("from")
        for source in sources:
            origin = self._context / source if stage is None else self._earlier[stage].inside(source)
            to = self._root.inside(target)
            if origin.is_dir():
                # A folder's content goes into the target; symbolic links stay what they are.
                shutil.copytree(origin, to, symlinks=True, dirs_exist_ok=True, ignore=None if stage else self._left_out)
            else:
                shutil.copy2(origin, to / origin.name if to.is_dir() else to)

    def _left_out(self, folder: str, names: list[str]) -> set[str]:
        within = PurePosixPath(Path(folder).relative_to(self._context))
        return {name for name in names if self._ignore(within / name)}


@contextlib.contextmanager
def mounted(folder: Path) -> Iterator[None]:
    """/proc, and this machine's name servers, while steps of a build run."""
    shutil.copyfile("/etc/resolv.conf", folder / "etc" / "resolv.conf")
    subprocess.run(["mount", "-t", "proc", "proc", folder / "proc"], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", folder / "proc"], check=True)


def bind(source: Path, target: Path) -> None:
    """Show a file or folder of this machine at another place, for reading. It goes with the mount namespace."""
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    subprocess.run(["mount", "--bind", "-o", "ro", source, target], check=True)


class Container:
    """A process started in a root as an engine would start it, in namespaces of its own; `beside` shares another one's network."""

    def __init__(
        self,
        root: Root,
        words: Sequence[str],
        *,
        beside: Container | None = None,
        output: int | None = None,
        **environment: str,
    ) -> None:
        self._root = root
        self._environment = environment
        prepare = (
            f'mount -t tmpfs shm {root.folder}/dev/shm && {"true" if beside else "ip link set lo up"} && exec "$@"'
        )
        network = ["nsenter", f"--net=/proc/{beside.pid}/ns/net"] if beside else []
        namespaces = ["--pid", "--ipc", "--uts", f"--mount-proc={root.folder}/proc", *([] if beside else ["--net"])]
        self.process = subprocess.Popen(
            [
                *network,
                *("unshare", *namespaces, "--fork", "--kill-child"),
                *("sh", "-c", prepare, "sh", *root.command([*root.entrypoint, *words], **environment)),
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
        """Run a command beside the first process, in its environment, to its end."""
        entered = ["nsenter", f"--target={self.pid}", "--mount", "--pid", "--net", "--ipc", "--uts"]
        return subprocess.run(
            [*entered, *self._root.command(words, **self._environment)], capture_output=True, text=True, timeout=120
        )

    def _first_process(self) -> int:
        """The container's first process, by its number on this machine, once `unshare` has forked it."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        while not (numbers := children.read_text().split()):
            assert self.process.poll() is None, f"{self!r} has not come to life"
            time.sleep(0.01)
        return int(numbers[0])

    def healthy(self) -> bool:
        """What the image's health check says."""
        return self.execute(self._root.health).returncode == 0

    def signal(self, number: int) -> None:
        """To the first process, as `docker stop` does."""
        os.kill(self.pid, number)
