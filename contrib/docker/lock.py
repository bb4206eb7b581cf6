"""Write the lists of PyPI files for the image, each with its hash: `requirements.txt`, `torch.txt` for what differs by device,
and `build.txt` for what builds the wheel.

pip install uv && python contrib/docker/lock.py

Takes the newest versions that `pyproject.toml` allows. The hashes are of all files of a version, so that the lists hold for
every processor.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import tomllib

FOLDER = Path(__file__).parent
PROJECT = FOLDER.parents[1] / "pyproject.toml"
REQUIREMENTS, TORCH, BUILD = (FOLDER / name for name in ("requirements.txt", "torch.txt", "build.txt"))
PYTHON = "3.11"  # of Debian bookworm
ENTRY = re.compile(r"([a-z0-9-]+)==(\S+)")
OF_TORCH = re.compile(r"torch|triton|cuda-.*|nvidia-(?!ml-py).*")  # torch and the packages that only torch needs
SAYS = "# Written by contrib/docker/lock.py.\n"


def resolved(requirements: Sequence[str]) -> Iterator[str]:
    """Yield all packages that `requirements` need, as uv resolves them: each requirement with its hashes."""
    command = ["uv", "pip", "compile", "-", "--generate-hashes", "--python-version", PYTHON]
    options = ["--python-platform", "linux", "--no-annotate", "--no-header", "--quiet"]
    asked = "\n".join(requirements)
    return entries(subprocess.run([*command, *options], input=asked, check=True, capture_output=True, text=True).stdout)


def entries(text: str) -> Iterator[str]:
    """Yield each requirement of the list `text` with its hashes, without comments."""
    entry = ""
    for line in text.splitlines(keepends=True):
        if not line.startswith(("#", " ")):
            if entry:
                yield entry
            entry = ""
        if not line.startswith("#"):
            entry += line
    if entry:
        yield entry


def versions(path: Path) -> dict[str, str]:
    """Return the version of each package in the list at `path`. Raises ValueError if a requirement has no version or no hash."""
    found: dict[str, str] = {}
    for entry in entries(path.read_text()):
        named = ENTRY.match(entry)
        if named is None or "--hash=sha256:" not in entry:
            raise ValueError(f"{path.name}: no version or no hash in {entry!r}")
        found[named[1]] = named[2]
    return found


def is_of_torch(entry: str) -> bool:
    """Return whether the package of `entry` is torch or a package that only torch needs; these differ by device."""
    return OF_TORCH.fullmatch(entry.partition("==")[0]) is not None


def main() -> None:
    project = tomllib.loads(PROJECT.read_text())
    found = list(resolved(project["project"]["dependencies"]))
    write(REQUIREMENTS, (entry for entry in found if not is_of_torch(entry)))
    write(TORCH, filter(is_of_torch, found))
    write(BUILD, resolved(project["build-system"]["requires"]))


def write(path: Path, found: Iterable[str]) -> None:
    path.write_text(SAYS + "".join(found))


if __name__ == "__main__":
    main()
