"""A folder for fetched files: sparse files of full size, and marks of the chunks that are present.

A chunk is written first and marked afterwards (one byte per chunk), so a chunk torn by a killed process is fetched
again. After a power cut, a mark may be on the disk without its chunk. Therefore each process hashes existing chunks
once.

Weight cache: the part of a checkpoint that this machine has fetched, in one folder per swarm, within a bound for all
swarms.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from swarmnode.errors import LocalError, with_advice
from swarmnode.files import lock_alone, lock_with_others
from swarmnode.swarm.storage.content import CHUNK_BYTES, FileContent, verify_chunk, verify_hashes

HAVE = b"\x01"


class ChunkFolder:
    """Chunks of files, by file name. `write` and the reading methods may be called from any thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._hashes: dict[str, bytes] = {}
        self._checked: dict[str, set[int]] = {}  # chunks of each file that this process has hashed
        self._beginning = threading.Lock()

    def path(self, file: FileContent) -> Path:
        """Return the path of `file` in the folder; until all chunks are there, the file on disk has holes."""
        return self.folder / file.name

    def _marks(self, file: FileContent) -> Path:
        return self.folder / f".{file.name}.have"

    def _is_begun(self, file: FileContent) -> bool:
        try:
            return self.path(file).stat().st_size == file.size
        except FileNotFoundError:
            return False

    def have(self, file: FileContent) -> bytes:
        """Return one byte for each chunk of `file`: 1 if it is here, else 0."""
        try:
            marks = self._marks(file).read_bytes() if self._is_begun(file) else b""
        except FileNotFoundError:
            marks = b""
        return marks.ljust(file.chunks(), b"\x00")[: file.chunks()]

    def missing(self, file: FileContent, numbers: Iterable[int]) -> list[int]:
        """Return the missing chunks among `numbers`. Chunks of an earlier process are hashed at the first
        look."""
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
        """Return the bytes at a chunk's place, whether or not it is present."""
        with self.path(file).open("rb") as stream:
            stream.seek(number * CHUNK_BYTES)
            return stream.read(CHUNK_BYTES)

    def write(self, file: FileContent, number: int, data: bytes | bytearray | memoryview) -> None:
        """Keep a verified chunk. Raises LocalError if the disk is full or cannot be written."""
        try:
            with self._beginning:
                if not self._is_begun(file):
                    # a file of full size without content; marks left from an earlier file are removed first
                    self._marks(file).unlink(missing_ok=True)
                    self._checked.pop(file.name, None)
                    with self.path(file).open("wb") as stream:
                        stream.truncate(file.size)
            _write_at(self.path(file), number * CHUNK_BYTES, data)
            _write_at(self._marks(file), number, HAVE)
        except OSError as error:
            raise disk_error(self.folder, error) from error
        self._checked.setdefault(file.name, set()).add(number)

    def hashes(self, file: FileContent) -> bytes | None:
        """Return the verified list of the file's chunk hashes; None if it is not here or wrong."""
        if file.name not in self._hashes:
            try:
                found = (self.folder / f".{file.name}.hashes").read_bytes()
            except FileNotFoundError:
                return None
            if not verify_hashes(file, found):
                return None
            self._hashes[file.name] = found
        return self._hashes[file.name]

    def store_hashes(self, file: FileContent, hashes: bytes) -> None:
        """Keep a verified list of chunk hashes. Raises LocalError if the disk cannot be written."""
        self._hashes[file.name] = hashes
        try:
            (self.folder / f".{file.name}.hashes").write_bytes(hashes)
        except OSError as error:
            raise disk_error(self.folder, error) from error

    def remove(self, name: str) -> None:
        """Delete the file `name` and all that is kept about it. Chunks that are fetched later begin it anew."""
        for path in (self.folder / name, self.folder / f".{name}.have", self.folder / f".{name}.hashes"):
            path.unlink(missing_ok=True)
        self._hashes.pop(name, None)
        self._checked.pop(name, None)

    def make_room(self, needed_bytes: int) -> None:
        """Check that `needed_bytes` can be added. Raises LocalError if the disk has no room for them."""
        lacking = needed_bytes - shutil.disk_usage(self.folder).free
        if needed_bytes > 0 and lacking > 0:
            raise LocalError(
                f"{self.folder} needs {needed_bytes / 1e6:.0f} MB, {lacking / 1e6:.0f} MB more than the disk "
                "has room for; free some disk space or choose another --home"
            )


def used_bytes(folder: Path) -> int:
    """Return the disk space that the files of a folder really take (holes take none)."""
    used = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # another process has just evicted it
            found = path.stat()
            used += found.st_size if sys.platform == "win32" else found.st_blocks * 512
    return used


def disk_error(folder: Path, error: OSError) -> LocalError:
    """Return the error for a folder that cannot be written."""
    full = {errno.ENOSPC: "free disk space or choose another --home"}
    return LocalError(f"cannot keep files in {folder}: {with_advice(error, 'choose another --home', full)}")


def _write_at(path: Path, offset: int, data: bytes | bytearray | memoryview) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.lseek(descriptor, offset, os.SEEK_SET)
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
    finally:
        os.close(descriptor)


FOLDER = "weights"  # in the home folder
BACKUPS = "backups"  # beside it, within the same bound: `state_store.py`
DISK_SHARE = 0.8  # of the free space, if no bound is given


class WeightCache(ChunkFolder):
    """Weights of a swarm, in its folder under `root`. While it is open, other processes do not evict it.

    `max_bytes` bounds the folders of all swarms together.
    """

    def __init__(self, root: Path, swarm_id: bytes, max_bytes: int | None = None) -> None:
        super().__init__(root / folder_name(swarm_id))
        self.root = root
        self._max_bytes = max_bytes
        try:
            self._lock = _share(self.folder)
        except OSError as error:
            raise disk_error(self.folder, error) from error

    def make_room(self, needed_bytes: int) -> None:
        """Make room for `needed_bytes`: unused folders of other swarms are removed, least recently used first.

        Raises LocalError if that is not enough.
        """
        used = used_bytes(self.root) + used_bytes(self.root.parent / BACKUPS)
        room = used + int(shutil.disk_usage(self.root).free * DISK_SHARE)
        allowed = self._max_bytes
        excess = used + needed_bytes - (room if allowed is None else allowed)
        for folder in sorted(self.root.iterdir(), key=last_used):
            if excess <= 0:
                return
            if folder != self.folder:
                excess -= evict(folder)
        if excess > 0 and needed_bytes > 0:
            bound = "there is room for; free some disk space, hold a smaller --span or choose another --home"
            if allowed is not None:
                bound = f"--disk {allowed / 1e6:.0f}MB leaves; allow more with --disk, or hold a smaller --span"
            raise LocalError(
                f"the weights need {needed_bytes / 1e6:.0f} MB in {self.root}, {excess / 1e6:.0f} MB more than {bound}"
            )

    def close(self) -> None:
        """Allow other processes to evict the folder."""
        with contextlib.suppress(OSError):
            os.utime(self.folder)
        self._lock.close()


def folder_name(swarm_id: bytes) -> str:
    """Return the name of the folder for a swarm's weights."""
    return swarm_id.hex()[:16]


def last_used(folder: Path) -> float:
    """Return the unix time of the last use; 0 if the folder is gone."""
    try:
        return folder.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _share(folder: Path) -> IO[bytes]:
    """Lock the folder. If it was evicted during the wait for the lock, it is made again."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / ".lock"
        try:
            lock = lock_with_others(path)
            if os.path.samestat(path.stat(), os.fstat(lock.fileno())):
                os.utime(folder)
                return lock
            lock.close()
        except FileNotFoundError:
            continue


def evict(folder: Path) -> int:
    """Remove a folder that no process uses. Returns the bytes freed; 0 if it is in use or cannot be removed."""
    size = used_bytes(folder)
    try:
        lock = lock_alone(folder / ".lock")
        if lock is None:
            return 0
        with lock:
            shutil.rmtree(folder)
    except OSError:
        return 0
    return size
