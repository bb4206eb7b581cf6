"""Backups: training states of other peers on this disk, in case these are lost; for each writer a folder, with its latest run.

    <home>/backups/<swarm>/<digest of the writer>/<run>/step-...    as in `states.py`

Nobody's states make room for another's, unless they were not added to for long.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from swarmnode.errors import Busy
from swarmnode.net.interfaces import PeerId
from swarmnode.swarm.records.announcement import peer_digest
from swarmnode.swarm.records.run import Run
from swarmnode.swarm.storage.chunk_folder import used_bytes
from swarmnode.swarm.storage.content import FileContent
from swarmnode.swarm.storage.states import StateStore, stored_runs
from swarmnode.swarm.storage.weight_cache import BACKUPS, folder_name
from swarmnode.swarm.storage.weight_cache import FOLDER as WEIGHTS

OFFERED_SHARE = 0.25  # of the bound, or of the disk space that is free where none is given; the rest is for weights
WRITER_SHARE = 0.25  # of the whole, at most, for what one writer brings
KEPT_STEPS = 2
MAX_WRITERS = 64
STALE_S = 7 * 24 * 3600.0  # not added to for so long, a folder makes room for others
RETRY_S = 600.0  # for who found no room


class BackupFolder:
    """Of one swarm; `share` of `max_bytes` is for the backups of all swarms. Methods may be called from any thread, and raise
    OSError where the disk cannot be used."""

    def __init__(
        self, home: Path, swarm_id: bytes, max_bytes: int | None = None, *, share: float = OFFERED_SHARE
    ) -> None:
        self._home = home
        self._share = share
        self._folder = home / BACKUPS / folder_name(swarm_id)
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._stores: dict[str, StateStore] = {}  # by writer
        for folder in sorted(self._folder.iterdir()):
            for run in stored_runs(folder)[:1]:
                self._stores[folder.name] = StateStore(folder, run, KEPT_STEPS)

    def __repr__(self) -> str:
        return f"<BackupFolder {self._folder.name} of {len(self._stores)} writers>"

    def close(self) -> None:
        """Let another process take the folders."""
        for store in self._stores.values():
            store.close()

    # -- what is there

    def run(self) -> Run | None:
        """The run of most writers."""
        votes = Counter(store.run for store in list(self._stores.values()) if store.steps())
        return max(votes, key=lambda run: (votes[run], run.id), default=None)

    def of_run(self, run_id: bytes) -> Iterator[StateStore]:
        """What is kept of a run, writer by writer."""
        return (store for store in list(self._stores.values()) if store.run.id == run_id)

    def find(self, root: bytes) -> tuple[StateStore, int, int, FileContent, Path] | None:
        """Store, step, block, description and path of the file with this root."""
        for store in list(self._stores.values()):
            found = store.find(root)
            if found is not None:
                return store, *found
        return None

    # -- room

    @property
    def free_bytes(self) -> int:
        """What all writers together may still bring."""
        return max(0, self._limit_bytes() - used_bytes(self._home / BACKUPS))

    def _limit_bytes(self) -> int:
        if self._max_bytes is not None:
            weights_bytes = used_bytes(self._home / WEIGHTS)
            return max(0, min(int(self._share * self._max_bytes), self._max_bytes - weights_bytes))
        return used_bytes(self._home / BACKUPS) + int(OFFERED_SHARE * shutil.disk_usage(self._folder).free)

    def open(self, writer: PeerId, run: Run, size_bytes: int) -> StateStore:
        """Where a writer's states of a run are kept, with room for one more of this size; those of its other runs go. Raises Busy
        where there is none, LocalError."""
        name = peer_digest(writer).hex()
        with self._lock:
            store = self._stores.get(name)
            own_bytes = 0 if store is None or store.run != run else used_bytes(store.folder)
            self._make_room(name, size_bytes)
            share_bytes = int(WRITER_SHARE * self._limit_bytes())
            if own_bytes + size_bytes > share_bytes:
                raise Busy(
                    f"{size_bytes / 1e6:.1f} MB more would be more than one peer may keep here: {share_bytes / 1e6:.1f} MB",
                    retry_s=RETRY_S,
                )
            if store is None or store.run != run:
                if store is not None:
                    store.close()
                    shutil.rmtree(store.folder, ignore_errors=True)
                store = self._stores[name] = StateStore(self._folder / name, run, KEPT_STEPS)
            return store

    def _make_room(self, name: str, size_bytes: int) -> None:
        """Have the longest unused folders go, as far as needed. Raises Busy."""
        stale = sorted((_last_used(store), other) for other, store in self._stores.items() if other != name)
        for used_at, other in stale:
            if used_at > time.time() - STALE_S or (size_bytes <= self.free_bytes and len(self._stores) < MAX_WRITERS):
                break
            store = self._stores.pop(other)
            store.close()
            shutil.rmtree(self._folder / other, ignore_errors=True)
        if size_bytes > self.free_bytes:
            raise Busy(
                f"the disk space offered for others' training states is full: {self.free_bytes / 1e6:.1f} MB are left",
                retry_s=RETRY_S,
            )
        if name not in self._stores and len(self._stores) >= MAX_WRITERS:
            raise Busy(f"training states of {MAX_WRITERS} peers are kept here already", retry_s=RETRY_S)


def _last_used(store: StateStore) -> float:
    """Unix time."""
    return store.folder.stat().st_mtime
