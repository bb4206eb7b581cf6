"""Root of a container: a folder with the settings of an image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # default of images


@dataclass
class Root:
    """Root file system of a container: `folder` holds the files; the other fields are the image's configuration."""

    folder: Path
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": PATH})
    user: str = "root"
    workdir: str = "/"
    entrypoint: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"<Root {self.folder} {self.user} {' '.join(self.entrypoint)}>"

    def inside(self, path: str) -> Path:
        """Return where the container's `path`, absolute or relative to `workdir`, lies on this machine."""
        return self.folder / (PurePosixPath(self.workdir) / path).relative_to("/")

    def command(self, words: Sequence[str], **environment: str) -> list[str]:
        """Return the command that runs `words` in this root. Each program replaces itself with the next, so the process id
        stays."""
        variables = [f"{name}={value}" for name, value in {**self.environment, **environment}.items()]
        entered = ["chroot", f"--userspec={self.user}", str(self.folder)]
        return [*entered, "env", "--ignore-environment", f"--chdir={self.workdir}", *variables, *words]
