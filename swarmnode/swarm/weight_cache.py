"""The part of a checkpoint that this machine has fetched: sparse files of full size, and which of their chunks are there.

A chunk is written first and marked afterwards (one byte per chunk), so one that a killed process tore is fetched again.
After a power cut a mark may be on the disk without its chunk: each process therefore hashes what it finds, once.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from swarmnode.errors import LocalError
from swarmnode.swarm.content import FileContent, verify_chunk, verify_hashes
from swarmnode.swarm.manifest import Manifest

HAVE = b"\x01"
DISK_SHARE = 0.8  # of what is free, where no bound is given


class WeightCache:
    """One swarm's folder under `root`. Opening it holds it against eviction by other processes until `close`.

    `max_bytes` bounds all swarms' folders together. `write` and the reading methods may be called from any thread.
    """

    def __init__(self, root: Path, swarm_id: bytes, manifest: Manifest, max_bytes: int | None = None) -> None:
        self.root = root
        self.folder = root / swarm_id.hex()[:16]
        self._manifest = manifest
        self._max_bytes = max_bytes
        self._hashes: dict[str, bytes] = {}
        self._checked: dict[str, set[int]] = {}  # chunks of each file that this process has hashed
        self._beginning = threading.Lock()
        try:
            self._lock = _share(self.folder)
        except OSError as error:
            raise _disk_error(self.folder, error) from error

    def __repr__(self) -> str:
        return f"<WeightCache {self.folder.name} with {used_bytes(self.folder) / 1e6:.0f} MB>"

    def path(self, file: FileContent) -> Path:
        """The (sparse) file itself."""
        return self.folder / file.name

    def _marks(self, file: FileContent) -> Path:
        return self.folder / f".{file.name}.have"

    def _is_begun(self, file: FileContent) -> bool:
        try:
            return self.path(file).stat().st_size == file.size
        except FileNotFoundError:
            return False

    def have(self, file: FileContent) -> bytes:
        """One byte per chunk: whether it is marked as being there."""
        try:
            marks = self._marks(file).read_bytes() if self._is_begun(file) else b""
        except FileNotFoundError:
            marks = b""
        return marks.ljust(file.chunks(), b"\x00")[: file.chunks()]

    def missing(self, file: FileContent, numbers: Iterable[int]) -> list[int]:
        """Which of these chunks are not there. What an earlier process left is hashed at the first look."""
        have, hashes = self.have(file), self.hashes(file)
        checked = self._checked.setdefault(file.name, set())
        missing = []
        for number in sorted(set(numbers)):
            there = have[number : number + 1] == HAVE
            if there and number not in checked:
                there = hashes is not None and verify_chunk(hashes, number, self.read(file, number))
            if there:
                checked.add(number)
            else:
                missing.append(number)
        return missing

    def read(self, file: FileContent, number: int) -> bytes:
        """The bytes where a chunk belongs, whether or not it is there."""
        with self.path(file).open("rb") as stream:
            stream.seek(number * self._manifest.chunk_bytes)
            return stream.read(self._manifest.chunk_bytes)

    def write(self, file: FileContent, number: int, data: bytes | bytearray | memoryview) -> None:
        """Keep a verified chunk. Raises LocalError where the disk is full."""
        try:
            with self._beginning:
                if not self._is_begun(file):
                    self._begin(file)
            _write_at(self.path(file), number * self._manifest.chunk_bytes, data)
            _write_at(self._marks(file), number, HAVE)
        except OSError as error:
            raise _disk_error(self.folder, error) from error
        self._checked.setdefault(file.name, set()).add(number)

    def _begin(self, file: FileContent) -> None:
        """A file of full size without content. Marks that outlived an earlier one go first."""
        self._marks(file).unlink(missing_ok=True)
        self._checked.pop(file.name, None)
        with self.path(file).open("wb") as stream:
            stream.truncate(file.size)

    def hashes(self, file: FileContent) -> bytes | None:
        """The verified list of the file's chunk hashes, if it is here."""
        if file.name not in self._hashes:
            try:
                found = (self.folder / f".{file.name}.hashes").read_bytes()
            except FileNotFoundError:
                return None
            if not verify_hashes(file, found):
                return None
            self._hashes[file.name] = found
        return self._hashes[file.name]

    def keep_hashes(self, file: FileContent, hashes: bytes) -> None:
        """Keep a verified list of chunk hashes."""
        self._hashes[file.name] = hashes
        try:
            (self.folder / f".{file.name}.hashes").write_bytes(hashes)
        except OSError as error:
            raise _disk_error(self.folder, error) from error

    def make_room(self, needed_bytes: int) -> None:
        """See that so many bytes may be added: other swarms' folders go, least recently used first, unless in use.

        Raises LocalError where that is not enough.
        """
        used = used_bytes(self.root)
        free = shutil.disk_usage(self.root).free
        bound = self._max_bytes if self._max_bytes is not None else used + int(free * DISK_SHARE)
        excess = used + needed_bytes - bound
        for folder in sorted(self.root.iterdir(), key=_last_used):
            if excess <= 0:
                return
            if folder != self.folder:
                excess -= _evict(folder)
        if excess > 0 and needed_bytes > 0:
            raise LocalError(
                f"the weights need {needed_bytes / 1e6:.0f} MB in {self.root}, {excess / 1e6:.0f} MB more than there is "
                "room for; free some disk space, hold a smaller --span or choose another --home"
            )

    def close(self) -> None:
        """Let others evict it."""
        with contextlib.suppress(OSError):
            os.utime(self.folder)
        self._lock.close()


def used_bytes(folder: Path) -> int:
    """Disk space that the files of a folder really take (holes take none)."""
    return sum(_size(path) for path in folder.rglob("*"))


def _size(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0  # another process has just evicted it


def _last_used(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _write_at(path: Path, offset: int, data: bytes | bytearray | memoryview) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        view = memoryview(data)
        while view:
            written = os.pwrite(descriptor, view, offset)
            view, offset = view[written:], offset + written
    finally:
        os.close(descriptor)


def _share(folder: Path) -> IO[bytes]:
    """Hold the folder. Where somebody evicted it while we waited for the lock, it is made anew."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / ".lock"
        try:
            lock = path.open("wb")
            fcntl.flock(lock, fcntl.LOCK_SH)
            if os.path.samestat(path.stat(), os.fstat(lock.fileno())):
                os.utime(folder)
                return lock
            lock.close()
        except FileNotFoundError:
            continue


def _evict(folder: Path) -> int:
    """Remove a folder that no process uses; the bytes that this freed."""
    size = used_bytes(folder)
    try:
        with (folder / ".lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
    except OSError:
        return 0
    return size


def _disk_error(folder: Path, error: OSError) -> LocalError:
    return LocalError(
        f"cannot keep weights in {folder}: {error.strerror or error}; free disk space or choose another --home"
    )
