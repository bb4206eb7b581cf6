"""Weight cache: the part of a checkpoint that this machine has fetched, in one folder per swarm, within a bound for all
swarms."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import IO

from swarmnode.errors import LocalError
from swarmnode.files import lock_alone, lock_with_others
from swarmnode.swarm.storage.chunk_folder import ChunkFolder, disk_error, used_bytes

FOLDER = "weights"  # in the home folder
BACKUPS = "backups"  # beside it, within the same bound: `backups.py`
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
