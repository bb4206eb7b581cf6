"""Builder that carries out a Dockerfile's steps in a folder, with chroot and mount. Needs Linux and root."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from dockerfile import Ignore, Instruction, Stage, expand
from root import Root


class Builder:
    """Builder of one stage, in a root that holds the stage's base."""

    def __init__(
        self,
        root: Root,
        context: Path,
        earlier: Mapping[str, Root],
        arguments: Mapping[str, str],
        host: Mapping[str, str],
    ) -> None:
        """Take `arguments` from --build-arg; `host` holds further variables for RUN, which tell where this machine's packages
        are."""
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
        """Carry out all steps of `stage` and return its root; without `files` all but COPY and RUN, after an earlier build.

        Raises CalledProcessError if a RUN fails, KeyError for an unknown instruction.
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
            "CMD": lambda instruction: None,  # each start names its command
            "VOLUME": lambda instruction: None,  # an ordinary folder in this root
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
        known = self._variables()  # like an engine: the values before this line
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
                # The content of a folder goes into the target; symbolic links stay links.
                shutil.copytree(origin, to, symlinks=True, dirs_exist_ok=True, ignore=None if stage else self._left_out)
            else:
                shutil.copy2(origin, to / origin.name if to.is_dir() else to)

    def _left_out(self, folder: str, names: list[str]) -> set[str]:
        within = PurePosixPath(Path(folder).relative_to(self._context))
        return {name for name in names if self._ignore(within / name)}


@contextlib.contextmanager
def mounted(folder: Path) -> Iterator[None]:
    """Give the root `folder` this machine's name servers, and mount /proc in it within the context."""
    shutil.copyfile("/etc/resolv.conf", folder / "etc" / "resolv.conf")
    subprocess.run(["mount", "-t", "proc", "proc", folder / "proc"], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", folder / "proc"], check=True)


def bind(source: Path, target: Path) -> None:
    """Mount the file or folder `source` read-only at `target`. The mount ends with the mount namespace."""
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    subprocess.run(["mount", "--bind", "-o", "ro", source, target], check=True)
