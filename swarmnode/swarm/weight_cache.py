"""The part of a checkpoint that this machine has fetched: sparse files of full size, and which of their chunks are there.

A chunk is written first and marked afterwards, so one that a crash tore is fetched again. Marks are one byte per chunk.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from swarmnode.errors import LocalError
from swarmnode.swarm.content import FileContent, verify_hashes
from swarmnode.swarm.manifest import Manifest

HAVE = b"\x01"
DISK_SHARE = 0.8  # of what is free, where no bound is given


class WeightCache:
    """One swarm's folder under `root`. Opening it holds it against eviction by other processes until `close`."""

    def __init__(self, root: Path, swarm_id: bytes, manifest: Manifest, max_bytes: int | None = None) -> None:
        self.root = root
        self.folder = root / swarm_id.hex()[:16]
        self._manifest = manifest
        self._hashes: dict[str, bytes] = {}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = _share(self.folder)
        except OSError as error:
            raise _disk_error(self.folder, error) from error
        self._max_bytes = max_bytes

    def __repr__(self) -> str:
        return f"<WeightCache {self.folder.name} with {used_bytes(self.folder) / 1e6:.0f} MB>"

    def path(self, file: FileContent) -> Path:
        """The (sparse) file itself."""
        return self.folder / file.name

    def _marks(self, file: FileContent) -> Path:
        return self.folder / f".{file.name}.have"

    def have(self, file: FileContent) -> bytes:
        """One byte per chunk: whether it is there."""
        try:
            marks = self._marks(file).read_bytes()
            if self.path(file).stat().st_size != file.size:
                return bytes(file.chunks())
        except FileNotFoundError:
            return bytes(file.chunks())
        return marks.ljust(file.chunks(), b"\x00")[: file.chunks()]

    def missing(self, file: FileContent, numbers: Iterable[int]) -> list[int]:
        """Which of these chunks are not there yet."""
        have = self.have(file)
        return [number for number in sorted(set(numbers)) if have[number : number + 1] != HAVE]

    def write(self, file: FileContent, number: int, data: bytes | bytearray | memoryview) -> None:
        """Keep a verified chunk. Raises LocalError where the disk is full."""
        try:
            self._write_at(self.path(file), number * self._manifest.chunk_bytes, data, file.size)
            self._write_at(self._marks(file), number, HAVE, file.chunks())
        except OSError as error:
            raise _disk_error(self.folder, error) from error

    @staticmethod
    def _write_at(path: Path, offset: int, data: bytes | bytearray | memoryview, size: int) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if os.fstat(descriptor).st_size != size:
                os.ftruncate(descriptor, size)
            view = memoryview(data)
            while view:
                written = os.pwrite(descriptor, view, offset)
                view, offset = view[written:], offset + written
        finally:
            os.close(descriptor)

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
        """See that so many bytes may be added: other swarms' folders go, least recently used first, unless they are in use.

        Raises LocalError where that is not enough.
        """
        free_bytes = shutil.disk_usage(self.root).free
        bound = self._max_bytes if self._max_bytes is not None else int(used_bytes(self.root) + free_bytes * DISK_SHARE)
        excess = used_bytes(self.root) + needed_bytes - bound
        others = sorted(
            (path for path in self.root.iterdir() if path != self.folder), key=lambda path: path.stat().st_mtime
        )
        for folder in others:
            if excess <= 0:
                break
            size = used_bytes(folder)
            if _evict(folder):
                excess -= size
        if excess > 0:
            raise LocalError(
                f"the weights need {needed_bytes / 1e6:.0f} MB in {self.root}, {excess / 1e6:.0f} MB more than there is room "
                "for; free some disk space or choose another --home"
            )

    def close(self) -> None:
        """Let others evict it."""
        os.utime(self.folder)
        self._lock.close()


def used_bytes(folder: Path) -> int:
    """Disk space that the files of a folder really take (holes take none)."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def _share(folder: Path) -> IO[bytes]:
    lock = (folder / ".lock").open("wb")
    fcntl.flock(lock, fcntl.LOCK_SH)
    return lock


def _evict(folder: Path) -> bool:
    """Remove a folder that no process uses."""
    try:
        with (folder / ".lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
    except OSError:
        return False
    return True


def _disk_error(folder: Path, error: OSError) -> LocalError:
    return LocalError(
        f"cannot keep weights in {folder}: {error.strerror or error}; free disk space or choose another --home"
    )
