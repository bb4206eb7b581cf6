"""Files of this machine: locks, bounded reads, tries in a process of their own, and writes that outlast a power cut.

A file is flushed to the disk with the folder that names it before anything relies on it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

from swarmnode.errors import Busy, LocalError


def existing(folder: Path) -> Path:
    """Return `folder` or, if it does not exist, its nearest existing parent."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def may_write(path: Path) -> bool:
    """Return whether the file `path` may be written, or files may be created in the folder `path`. False if `path` does not
    exist."""
    mode = os.W_OK | os.X_OK if path.is_dir() else os.W_OK
    return os.access(path, mode, effective_ids=os.access in os.supports_effective_ids)


def lock_alone(path: Path) -> IO[bytes] | None:
    """Lock the file `path` exclusively until the returned file is closed; it is created if missing, and emptied.

    Returns None if another process holds it. Raises OSError if it cannot be opened, LocalError on Windows.
    """
    return _locked(path, alone=True)


def lock_in_turn(path: Path) -> IO[bytes]:
    """Lock the file `path` exclusively, as `lock_alone`, after waiting while others hold it. Raises OSError if it cannot be opened,
    LocalError on Windows."""
    file = _locked(path, alone=True, wait=True)
    assert file is not None
    return file


def lock_with_others(path: Path) -> IO[bytes]:
    """Lock the file `path` together with others until the returned file is closed; it is created if missing, and emptied.

    Waits while a process holds it alone. Raises OSError if it cannot be opened, LocalError on Windows.
    """
    file = _locked(path, alone=False, wait=True)
    assert file is not None
    return file


def _locked(path: Path, *, alone: bool, wait: bool = False) -> IO[bytes] | None:
    if sys.platform == "win32":
        raise LocalError("Windows has no such locks on files: run swarmnode in WSL 2 or in Docker")
    import fcntl

    file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")  # whatever the umask
    try:
        fcntl.flock(file, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        file.close()
        return None
    except BaseException:
        file.close()
        raise
    return file


def read_bounded(path: str | Path, max_bytes: int) -> bytes | None:
    """Return the content of the file `path`; None if it is longer than `max_bytes`. Raises OSError if it cannot be read, ValueError
    if `path` cannot be a path."""
    with Path(path).open("rb") as file:
        content = file.read(max_bytes + 1)
    return content if len(content) <= max_bytes else None


def parse_json(text: bytes | str) -> Any:
    """Return the value of a JSON text that a user or another machine gives. Raises ValueError if it is not JSON, or is nested too
    deeply, for which `json.loads` raises RecursionError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None


def try_apart(program: str, given: Any, *, cpu_s: int, memory_bytes: int, patience_s: float) -> Any:
    """Run a Python program in a process of its own and return the JSON value that it prints; None if it fails.

    For libraries that read texts of others: a thread that hangs cannot be ended. The program finds the value of `given` under that
    name. It fails beyond `cpu_s` and one more second of CPU time and, on Linux, beyond `memory_bytes`. Raises Busy if it cannot be
    started, or does not end within `patience_s`.
    """
    values = json.dumps([given, cpu_s, memory_bytes]).encode()
    command, environment = [sys.executable, "-c", _BOUNDS + program], {**os.environ, "RAYON_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, input=values, env=environment, capture_output=True, timeout=patience_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Busy(f"a file or text of others was not tried in time: {error}", retry_s=patience_s) from None
    try:
        return parse_json(done.stdout)
    except ValueError:
        return None


_BOUNDS = """
import sys
sys.path[:] = [folder for folder in sys.path if folder]
import json, os, resource
given, seconds, most = json.load(sys.stdin)
resource.setrlimit(resource.RLIMIT_CPU, (seconds + 1, seconds + 1))
if sys.platform == "linux":
    most += int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
"""


def sync(path: Path) -> None:
    """Flush the file or folder `path` to the disk, so that it outlasts a power cut. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Flush the folder and all its contents to the disk. Raises OSError."""
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


def replace_durably(new: Path, path: Path) -> None:
    """Rename `new`, already on the disk, to `path`, atomically and flushed to the disk. Raises OSError."""
    new.replace(path)
    sync(path.parent)


def write_private(path: Path, data: bytes, *, make_folder: bool = False) -> None:
    """Write `data` to a file of mode 0600, atomically: a reader sees the old content or the new.

    `make_folder` also creates its missing parent folders, with mode 0700. Raises LocalError if the file cannot be written.
    """
    try:
        if make_folder:
            make_private(path.parent)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            replace_durably(Path(temporary), path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                Path(temporary).unlink()
            raise
    except OSError as error:
        raise LocalError(f"cannot write {path}: {error.strerror or error}; choose another place") from error


def linked_file(path: Path) -> Path:
    """Return the target of a link with an absolute target, else `path`: users know a linked model file by the target."""
    target = path.readlink() if path.is_symlink() else path
    return target if target.is_absolute() else path


def make_private(folder: Path) -> None:
    """Create the folder and its missing parents with mode 0700: `Path.mkdir` gives that mode to the last one only. Raises
    OSError."""
    if not folder.is_dir():
        make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def home_folder(home: str | Path | None = None) -> Path:
    """Return the folder for identities, caches and known peers, as an absolute path: `home`, else $SWARMNODE_HOME, else the
    platform's place for user data."""
    import platformdirs

    named = home or os.environ.get("SWARMNODE_HOME")
    return Path(named).expanduser().absolute() if named else Path(platformdirs.user_data_dir("swarmnode"))
