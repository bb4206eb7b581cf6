"""p2pd as a child process: started, watched and ended; never left behind.

Its sockets live in a private folder in the temp directory. The folder's name has the process id, and it holds a locked file, so
that the folders of killed processes can be recognised and removed at the next start.

A child process that ends with the process that started it, however that one ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import itertools
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swarmnode.errors import LocalError, with_advice
from swarmnode.files import lock_alone
from swarmnode.net.tasks import cancel_and_wait

PR_SET_PDEATHSIG = 1

# Looked up before there is a fork: between fork and exec nothing may be loaded or locked.
_prctl = ctypes.CDLL(None).prctl if sys.platform.startswith("linux") else None


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that forked it ends; for `preexec_fn`. Does nothing on systems other than
    Linux."""
    if _prctl is None or sys.platform == "win32":
        return
    parent = os.getppid()
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died between the fork and the call
        os.kill(os.getpid(), signal.SIGKILL)


log = logging.getLogger(__name__)

FOLDER_PREFIX = "swarmnode-"  # short: a socket's path may have 103 bytes (macOS), and hivemind's names take 26
MAX_FOLDER_CHARS = 76
LOCK_FILE = "lock"  # in the folder, held by its process
SPARE_FILES = 16  # more than the start of a process needs
START_TIMEOUT_S = 15.0
STOP_TIMEOUT_S = 3.0
DESCRIPTORS = 16_384


class SocketFolder:
    """A private folder for the control sockets between this process and p2pd."""

    def __init__(self) -> None:
        remove_stale_folders()
        prefix = f"{FOLDER_PREFIX}{os.getpid()}-"
        self.path = Path(tempfile.mkdtemp(prefix=prefix))  # mode 0700
        if len(str(self.path)) > MAX_FOLDER_CHARS:
            self.path.rmdir()
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir="/tmp"))  # nosec B108  # its name is drawn
        self._lock = None if sys.platform == "win32" else lock_alone(self.path / LOCK_FILE)
        self._sockets = itertools.count(1)

    def new_socket(self, name: str) -> Path:
        """Return a new path for a socket; the file of a killed process may still be at an old one."""
        return self.path / f"{name}-{next(self._sockets)}.sock"

    def remove(self) -> None:
        """Delete the folder with its contents; no error if it is gone."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()


def remove_stale_folders() -> None:
    """Remove the folders that killed processes of this user left behind."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        pid = folder.name.removeprefix(FOLDER_PREFIX).partition("-")[0]
        with contextlib.suppress(OSError):
            if (
                pid.isdigit()
                and not _is_alive(int(pid))
                and (sys.platform == "win32" or folder.stat().st_uid == os.getuid())
                and not _is_held(folder)
            ):
                shutil.rmtree(folder, ignore_errors=True)


def _is_held(folder: Path) -> bool:
    """Return whether a process holds the folder's lock: containers may share a folder, but do not see each other's processes."""
    if sys.platform == "win32":
        return False
    lock = lock_alone(folder / LOCK_FILE)
    if lock is not None:
        lock.close()
    return lock is None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def raise_descriptor_limit() -> None:
    """Raise the limit of open sockets of this process and its p2pd as far as the system permits; some shells set it to 256."""
    if sys.platform == "win32":  # it has no such limit
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # macOS has a lower bound of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _explained(error: OSError) -> OSError:
    """Return `error`, or EMFILE in place of uvloop's error without a cause if hardly any file can be opened any more."""
    if (error.errno or 0) > 0:
        return error
    spare: list[int] = []
    try:
        for _ in range(SPARE_FILES):
            spare.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as limit:
        return limit
    finally:
        for descriptor in spare:
            os.close(descriptor)
    return error


class Daemon:
    """Run of p2pd. Made by `start`; `exited` resolves with its exit code however it ends."""

    def __init__(self, process: asyncio.subprocess.Process, socket: Path) -> None:
        self.socket = socket
        self._process = process
        self.exited: asyncio.Future[int] = asyncio.ensure_future(process.wait())
        self._output = asyncio.ensure_future(self._read())
        self._ready = asyncio.Event()
        self._started_s = time.monotonic()
        self.last_line = ""

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    @property
    def age_s(self) -> float:
        """Seconds since its start."""
        return time.monotonic() - self._started_s

    @classmethod
    async def start(cls, binary: Path, flags: Sequence[str], socket: Path) -> Daemon:
        """Start p2pd and wait until it answers. Raises LocalError with its last line of output if it does not start."""
        try:
            process = await asyncio.create_subprocess_exec(
                str(binary),
                f"-listen=/unix{socket}",
                *flags,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env={**os.environ, "GOLOG_LOG_LEVEL": os.environ.get("GOLOG_LOG_LEVEL", "error")},
                preexec_fn=die_with_parent,
                start_new_session=True,  # a Ctrl-C at the terminal must not end p2pd, which is needed for draining
            )
        except OSError as error:
            processes = {errno.EAGAIN: "allow more processes (ulimit -u)"}
            reason = with_advice(_explained(error), "reinstall hivemind", processes)
            raise LocalError(f"cannot start p2pd ({binary}): {reason}") from error
        daemon = cls(process, socket)
        try:
            await asyncio.wait_for(daemon._until_ready(), START_TIMEOUT_S)
        except asyncio.TimeoutError:
            await daemon.stop()
            raise LocalError(
                f"p2pd did not start within {START_TIMEOUT_S:.0f} s: "
                f"{daemon.last_line}; start the node again, or on a less busy machine"
            ) from None
        except BaseException:
            await daemon.stop()
            raise
        return daemon

    async def _until_ready(self) -> None:
        ready = asyncio.ensure_future(self._ready.wait())
        either: set[asyncio.Future[Any]] = {ready, self.exited}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            ready.cancel()
            await self._output
            raise LocalError(f"p2pd failed to start: {self.last_line}; start the node again")

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for raw in self._process.stdout:
            line = raw.decode(errors="replace").strip()
            self.last_line = line or self.last_line
            log.debug("p2pd: %s", line)
            if line.startswith("Peer ID:"):
                self._ready.set()

    async def stop(self) -> None:
        """Stop p2pd: SIGTERM, then SIGKILL after STOP_TIMEOUT_S seconds. Calling it again changes nothing."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            await asyncio.wait_for(asyncio.shield(self.exited), STOP_TIMEOUT_S)
        except asyncio.TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self.exited
        await cancel_and_wait(self._output)
