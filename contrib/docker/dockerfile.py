"""Parser of Dockerfiles, so that the file itself can be tried without a Docker engine.

Reads the syntax that this project's Dockerfile uses (docs.docker.com/reference/dockerfile): comments, continued lines, stages,
JSON forms. No heredocs, no `# escape=`.
"""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath


@dataclass(frozen=True)
class Instruction:
    """Instruction of a Dockerfile: `keyword` in capitals, its `--name=value` flags, and the `text` after them."""

    keyword: str
    text: str
    flags: tuple[tuple[str, str], ...] = ()

    def flag(self, name: str) -> str | None:
        """Return the value of the flag `--name=value`; None if the instruction has no such flag."""
        return dict(self.flags).get(name)

    @property
    def words(self) -> list[str]:
        """Arguments of an exec form (`["a", "b"]`) or of a plain line (`a b`)."""
        return json.loads(self.text) if self.text.startswith("[") else shlex.split(self.text)

    @property
    def pairs(self) -> dict[str, str]:
        """`NAME=value` words as a dictionary; a word without a value stands for an empty one."""
        return {name: value for name, _, value in (word.partition("=") for word in self.words)}


@dataclass
class Stage:
    """Stage of a Dockerfile, from one FROM to the next; `name` is None without AS."""

    base: str
    name: str | None
    instructions: list[Instruction] = field(default_factory=list)

    def last(self, keyword: str) -> Instruction | None:
        """Return the last instruction with `keyword`, which is the one in force; None if there is none."""
        return next((each for each in reversed(self.instructions) if each.keyword == keyword), None)


def stages(text: str) -> list[Stage]:
    """Return the stages of the Dockerfile `text`. Raises ValueError if an instruction stands before the first FROM."""
    found: list[Stage] = []
    for instruction in instructions(text):
        if instruction.keyword == "FROM":
            base, *name = re.split(r"\s+AS\s+", instruction.text, flags=re.IGNORECASE)
            found.append(Stage(base, name[0] if name else None))
        elif not found:
            raise ValueError(f"{instruction.keyword} before the first FROM is not understood here")
        else:
            found[-1].instructions.append(instruction)
    return found


def instructions(text: str) -> Iterator[Instruction]:
    """Yield all instructions of the Dockerfile `text` in order."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    for logical in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        keyword, _, rest = logical.strip().partition(" ")
        flags = []
        while match := re.match(r"\s*--([a-z-]+)=(\S+)\s*", rest):
            flags.append((match[1], match[2]))
            rest = rest[match.end() :]
        yield Instruction(keyword.upper(), rest.strip(), tuple(flags))


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replace `$NAME` and `${NAME}` in `text` as an engine does in ENV, COPY and WORKDIR; unset names become empty."""
    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda match: variables.get(match[1] or match[2], ""), text)


class Ignore:
    """Rules of a .dockerignore: `ignore(path)` returns whether a path of the context is left out. The last matching pattern
    decides."""

    def __init__(self, text: str) -> None:
        lines = (line.strip() for line in text.splitlines())
        self._patterns = [line for line in lines if line and not line.startswith("#")]

    def __repr__(self) -> str:
        return f"<Ignore {' '.join(self._patterns)}>"

    def __call__(self, path: PurePosixPath) -> bool:
        ignored = False
        for pattern in self._patterns:
            if any(_fits(each, pattern.removeprefix("!")) for each in (path, *path.parents)):
                ignored = not pattern.startswith("!")
        return ignored


def _fits(path: PurePosixPath, pattern: str) -> bool:
    """Return whether `path` matches `pattern`: `**/name` at any depth, others from the top; `*` stays within one folder."""
    if pattern.startswith("**/"):
        return fnmatch.fnmatchcase(path.name, pattern.removeprefix("**/"))
    parts = PurePosixPath(pattern).parts
    return len(parts) == len(path.parts) and all(map(fnmatch.fnmatchcase, path.parts, parts))


def read(path: Path) -> list[Stage]:
    """Return the stages of the Dockerfile at `path`. Raises ValueError if an instruction stands before the first FROM."""
    return stages(path.read_text())
