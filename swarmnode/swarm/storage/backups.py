"""Backups: training states of other peers on this disk, in case these peers are lost.

    <home>/backups/<swarm>/<digest of the writer>/<run>/step-...    as in `states.py`

Each writer has a folder with its latest run. A writer's states make room for another's only after a week without
additions.
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

OFFERED_SHARE = 0.25  # of the bound, or of the free disk space if there is none; the rest is for weights
WRITER_SHARE = 0.25  # largest share of the space for one writer
KEPT_STEPS = 2
MAX_WRITERS = 64
STALE_S = 7 * 24 * 3600.0  # a folder without additions for this time makes room for others
RETRY_S = 600.0  # for a writer that found no room


class BackupFolder:
    """Backups of one swarm; `share` of `max_bytes` is for the backups of all swarms.

    Methods may be called from any thread. They raise OSError if the disk cannot be used.
    """

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

    def close(self) -> None:
        """Release the folders for other processes."""
        for store in self._stores.values():
            store.close()

    # -- lookup

    def run(self) -> Run | None:
        """Return the run of most writers; None if no step is kept."""
        votes = Counter(store.run for store in list(self._stores.values()) if store.steps())
        return max(votes, key=lambda run: (votes[run], run.id), default=None)

    def of_run(self, run_id: bytes) -> Iterator[StateStore]:
        """Return the stores of a run's states, one for each peer that sent states."""
        return (store for store in list(self._stores.values()) if store.run.id == run_id)

    def find(self, root: bytes) -> tuple[StateStore, int, int, FileContent, Path] | None:
        """Return store, step, block, description and path of the file with this root; None if it is not here."""
        for store in list(self._stores.values()):
            found = store.find(root)
            if found is not None:
                return store, *found
        return None

    # -- room

    @property
    def free_bytes(self) -> int:
        """Bytes that all writers together may still add."""
        return max(0, self._limit_bytes() - used_bytes(self._home / BACKUPS))

    def _limit_bytes(self) -> int:
        if self._max_bytes is not None:
            weights_bytes = used_bytes(self._home / WEIGHTS)
            return max(0, min(int(self._share * self._max_bytes), self._max_bytes - weights_bytes))
        return used_bytes(self._home / BACKUPS) + int(OFFERED_SHARE * shutil.disk_usage(self._folder).free)

    def open(self, writer: PeerId, run: Run, size_bytes: int) -> StateStore:
        """Return the store for a writer's states of a run, with room for `size_bytes` more. States of its other runs
        are removed.

        Raises Busy if there is no room, LocalError if the folder cannot be used.
        """
        name = peer_digest(writer).hex()
        with self._lock:
            store = self._stores.get(name)
            held_bytes = 0 if store is None else used_bytes(store.folder)
            is_old = store is not None and store.run != run  # its states make room for those of the new run
            own_bytes = 0 if is_old else held_bytes
            self._make_room(name, size_bytes - (held_bytes if is_old else 0))
            share_bytes = int(WRITER_SHARE * self._limit_bytes())
            if own_bytes + size_bytes > share_bytes:
                raise Busy(
                    f"{size_bytes / 1e6:.1f} MB more would be more than one peer may keep here: {share_bytes / 1e6:.1f} MB",
                    retry_s=RETRY_S,
                )
            if store is None or is_old:
                if store is not None:
                    store.close()
                    shutil.rmtree(store.folder, ignore_errors=True)
                store = self._stores[name] = StateStore(self._folder / name, run, KEPT_STEPS)
            return store

    def _make_room(self, name: str, size_bytes: int) -> None:
        """Remove the longest unused stale folders until there is room. Raises Busy if they are not enough."""
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
    """Return the unix time at which a state was last added to the store."""
    return store.folder.stat().st_mtime
