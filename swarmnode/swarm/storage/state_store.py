"""States of a training on this disk: one folder per step, one file per block. A step is present entirely or not at all.

    <root>/<run>/run.msgpack                         the run
    <root>/<run>/step-00000042/unit-0004.safetensors a block; shared.safetensors for weights that first and last layer share
    <root>/<run>/step-00000042/files.msgpack         sizes and roots of the blocks
    <root>/<run>/.incoming-00000043/                 chunks of a step that is being fetched

Any other name that begins with a dot is a step half written, or half replaced, by a process that was killed.

Backups: training states of other peers on this disk, in case these peers are lost.

    <home>/backups/<swarm>/<digest of the writer>/<run>/step-...    as its own states

Each writer has a folder with its latest run. A writer's states make room for another's only after a week without
additions.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO

import msgspec

from swarmnode.codec.body import DECODE_ERRORS, SHARED
from swarmnode.errors import Busy, CheckpointError, LocalError, ProtocolError
from swarmnode.files import lock_alone, sync, write_private
from swarmnode.net.fair_share import Recent
from swarmnode.net.interfaces import PeerId
from swarmnode.swarm.records.announcement import peer_digest
from swarmnode.swarm.records.run import Run, decode_run, encode_run
from swarmnode.swarm.storage.chunk_folder import BACKUPS, ChunkFolder, disk_error, folder_name, used_bytes
from swarmnode.swarm.storage.chunk_folder import FOLDER as WEIGHTS
from swarmnode.swarm.storage.content import FileContent, describe_files, verify_file

log = logging.getLogger(__name__)

RUN_FILE = "run.msgpack"
FILES = "files.msgpack"
MAX_SLOTS = 64
NAME_CHARS = 16  # of a run's id, in the name of its folder
STRIDES = (1, 4, 16)  # checkpoints between two backups on other peers; the slower the uplink, the more
MAX_HELD = 4  # so that no peer can fill a disk by asking for ever newer steps
_STEP = re.compile(r"step-(\d{8,})")
_INCOMING = re.compile(r"\.incoming-(\d{8,})")
_decoder = msgspec.msgpack.Decoder(dict[int, FileContent])

WriteBlock = Callable[[int, Path], None]
"""Function of (block, path) that writes the block's state into a new file."""


class StateStore:
    """Steps of one run. Nodes that share a home have a folder each, because each knows only its own layers.

    The store keeps the newest `newest_steps` steps of those that the run names (every `checkpoint_steps`, and the last one),
    because all peers have them. It also keeps the newest two of every fourth and of every sixteenth checkpoint, the
    newest other step, and held steps (`hold`). Methods may be called from any thread.
    """

    def __init__(
        self, root: Path, run: Run, newest_steps: int = 3, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.run = run
        self.newest_steps = newest_steps
        self._clock = clock
        self._held_until: Recent[int, float] = Recent(MAX_HELD)  # the steps needed last come last
        self._holding = threading.Lock()
        self._writing = threading.Lock()
        self._damaged: frozenset[tuple[int, int]] = frozenset()
        try:
            self.folder, self._claim = _lock_folder(root, run.id)
            # after a killed process: a step that was being replaced is put back, a half-written step is removed
            for old in self.folder.glob(".old-*"):
                target = self._step_folder(int(old.name.removeprefix(".old-")))
                if not target.exists():
                    old.rename(target)
            for path in (*self.folder.glob(".old-*"), *self.folder.glob(".partial-*")):
                shutil.rmtree(path, ignore_errors=True)
            # an export reads the settings of the run, which lie beside its states
            path, described = self.folder / RUN_FILE, encode_run(self.run)
            if not path.exists() or path.read_bytes() != described:
                write_private(path, described)
            # Never changed, only replaced: other threads may be reading.
            self._steps = {step: self._read_files(path) for step, path in _numbered(self.folder, _STEP).items()}
        except OSError as error:
            raise disk_error(root, error) from error

    def close(self) -> None:
        """Release the folder for other processes."""
        self._claim.close()

    # -- lookup

    def steps(self) -> dict[int, tuple[int, ...]]:
        """Return the blocks of every step, oldest step first. Steps without a sound block are left out."""
        found = {step: tuple(sorted(self.files(step))) for step in sorted(self._steps)}
        return {step: blocks for step, blocks in found.items() if blocks}

    def files(self, step: int) -> dict[int, FileContent]:
        """Return the blocks of a step with their sizes and roots, without those known to be damaged."""
        return {block: file for block, file in self._steps.get(step, {}).items() if (step, block) not in self._damaged}

    def newest(self) -> int | None:
        """Return the newest step with a state on this disk; None if there is none."""
        return max(self.steps(), default=None)

    def path(self, step: int, block: int, *, verify: bool = True) -> Path:
        """Return the file of a block. Raises CheckpointError if it is missing or, with `verify`, has a wrong hash."""
        file = self.files(step).get(block)
        if file is None:
            raise CheckpointError(
                f"{self.folder} has no training state of layer {block} at step {step}; start a peer that has it"
            )
        path = self._step_folder(step) / file.name
        try:
            if not verify or verify_file(path, file):
                return path
            fault = "it was changed or damaged"
        except OSError as error:
            fault = str(error.strerror or error)
        self.set_aside(step, block)
        raise CheckpointError(f"{path} cannot be used: {fault}; it counts as missing here")

    def set_aside(self, step: int, block: int) -> None:
        """Treat the file of a block as missing from now on, because it is damaged."""
        self._damaged |= {(step, block)}

    def find(self, root: bytes) -> tuple[int, int, FileContent, Path] | None:
        """Return step, block, description and path of the file with this root; None if it is not here."""
        for step in self._steps:
            for block, file in self.files(step).items():
                if file.root == root:
                    return step, block, file, self._step_folder(step) / file.name
        return None

    # -- writing

    def write(self, step: int, blocks: Iterable[int], write_block: WriteBlock) -> None:
        """Write blocks of a step. Its other blocks stay, and old steps are removed.

        Raises LocalError if the disk cannot be written; then nothing has changed.
        """
        partial = self.folder / f".partial-{step:08d}"
        with self._writing:
            try:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir()
                paths = {block: partial / file_name(block) for block in blocks}
                for block, path in paths.items():
                    write_block(block, path)
                    sync(path)
                self._publish(partial, step, dict(zip(paths, describe_files(list(paths.values())), strict=True)))
            except OSError as error:
                raise LocalError(
                    f"step {step} cannot be kept in {self.folder}: {error.strerror or error}; earlier steps are still "
                    "there. Free disk space or choose another --home"
                ) from error
            finally:
                shutil.rmtree(partial, ignore_errors=True)

    def hold(self, step: int, seconds: float) -> None:
        """Keep a step for `seconds` more, because a peer needs it. Only the steps held last count, `MAX_HELD` at most."""
        with self._holding:
            self._held_until[step] = self._clock() + seconds

    # -- fetching

    def incoming(self, step: int) -> ChunkFolder:
        """Return the folder for the chunks of a step that is being fetched, with chunks that an earlier process
        fetched.

        Raises LocalError if it cannot be created.
        """
        folder = self.folder / f".incoming-{step:08d}"
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise disk_error(folder, error) from error
        return ChunkFolder(folder)

    def begun(self) -> list[int]:
        """Return the steps whose fetch was begun and did not end, oldest first."""
        return sorted(_numbered(self.folder, _INCOMING))

    def complete(self, step: int, fetched: Mapping[int, FileContent]) -> None:
        """Make a step of the files of blocks whose chunks have all arrived. Raises LocalError if the disk cannot be
        written."""
        folder = self.incoming(step).folder
        files = {block: FileContent(file_name(block), file.size, file.root) for block, file in fetched.items()}
        try:
            with self._writing:
                for block, file in fetched.items():
                    (folder / file.name).rename(folder / file_name(block))
                    sync(folder / file_name(block))
                for path in set(folder.iterdir()) - {folder / file.name for file in files.values()}:
                    path.unlink()  # marks, hash lists, and parts of other versions
                self._publish(folder, step, files)
        except OSError as error:
            self.give_up(step)
            raise disk_error(self.folder, error) from error
        for older in self.begun():
            if older <= step:
                self.give_up(older)

    def give_up(self, step: int) -> None:
        """Remove the chunks of `step` that were fetched, as its fetch has ended without success."""
        shutil.rmtree(self.folder / f".incoming-{step:08d}", ignore_errors=True)

    # -- folders

    def _publish(self, folder: Path, step: int, files: dict[int, FileContent]) -> None:
        """Put a complete folder in the place of a step, then remove old steps."""
        target, old = self._step_folder(step), self.folder / f".old-{step:08d}"
        for block, file in self.files(step).items():
            if block not in files:
                os.link(target / file.name, folder / file.name)
                files[block] = file
        (folder / FILES).write_bytes(msgspec.msgpack.encode(files))
        sync(folder / FILES)
        sync(folder)
        if target.exists():
            target.rename(old)
        folder.rename(target)
        self._steps = {**self._steps, step: files}
        self._damaged -= {(step, block) for block in files}
        sync(self.folder)
        shutil.rmtree(old, ignore_errors=True)
        self._remove_old(step)

    def _remove_old(self, newest: int) -> None:
        named = [step for step in sorted(self._steps) if self.run.is_checkpoint(step)]
        others = [step for step in sorted(self._steps) if not self.run.is_checkpoint(step)]
        # the newest two on each of the wider intervals, which peers with slow uplinks back up
        apart = [stride * self.run.checkpoint_steps for stride in STRIDES[1:]]
        strides = [step for steps in apart for step in [step for step in named if step % steps == 0][-2:]]
        with self._holding:
            held = [step for step, until in self._held_until.items() if until > self._clock()]
        kept = {newest, *named[-self.newest_steps :], *strides, *others[-1:], *held}
        gone = set(self._steps) - kept
        self._steps = {step: files for step, files in self._steps.items() if step in kept}
        for step in gone:
            shutil.rmtree(self._step_folder(step), ignore_errors=True)

    def _step_folder(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def _read_files(self, folder: Path) -> dict[int, FileContent]:
        """Return the files that a step should have, without missing files and files of another size."""
        try:
            files = _decoder.decode((folder / FILES).read_bytes())
        except (OSError, *DECODE_ERRORS) as error:
            log.warning("%s is damaged and ignored: %s", folder, error)
            return {}
        sound = {}
        for block, file in files.items():
            path = folder / file_name(block)
            if file.name == path.name and path.is_file() and path.stat().st_size == file.size:
                sound[block] = file
            else:
                log.warning("%s is missing or was cut short; it is ignored", path)
        return sound


def file_name(block: int) -> str:
    """Return the name of a block's file."""
    return "shared.safetensors" if block == SHARED else f"unit-{block:04d}.safetensors"


def stored_runs(root: Path) -> list[Run]:
    """Return the runs that have states in the folder of a swarm, the latest first. Damaged run files are skipped."""
    paths = sorted(root.glob(f"*/{RUN_FILE}"), key=lambda path: path.stat().st_mtime, reverse=True)
    runs: dict[bytes, Run] = {}
    for path in paths:
        with contextlib.suppress(OSError, ProtocolError):
            run = decode_run(path.read_bytes())
            runs.setdefault(run.id, run)
    return list(runs.values())


def remove_old_runs(root: Path, current: Run) -> None:
    """Remove the folders of old runs that no process uses, except the `current` run and the other run that came
    furthest.

    So beginning runs again and again fills no disk, and destroys no training.
    """
    others = [path.parent for path in root.glob(f"*/{RUN_FILE}") if not _is_of(path.parent, current.id)]
    furthest = max(others, key=_furthest_step, default=None)
    for folder in others:
        if furthest is not None and folder != furthest and not _is_of(folder, furthest):
            lock = lock_alone(folder / ".lock")
            if lock is not None:
                with lock:
                    shutil.rmtree(folder, ignore_errors=True)


def _is_of(folder: Path, run: bytes | Path) -> bool:
    """Return whether a folder is of a run, or of the same run as another folder: nodes that share a home have one
    folder each."""
    name = run.name if isinstance(run, Path) else run.hex()
    return folder.name[:NAME_CHARS] == name[:NAME_CHARS]


def _furthest_step(folder: Path) -> tuple[int, float]:
    return max(_numbered(folder, _STEP), default=0), folder.stat().st_mtime


def _numbered(folder: Path, name: re.Pattern[str]) -> dict[int, Path]:
    """Return the files and folders in a folder whose names match, by the number in the name."""
    return {int(found[1]): path for path in folder.iterdir() if (found := name.fullmatch(path.name))}


def _lock_folder(root: Path, run_id: bytes) -> tuple[Path, IO[bytes]]:
    """Lock and return the first folder of this run that no other process uses. Raises LocalError if all are in use."""
    name = run_id.hex()[:NAME_CHARS]
    for slot in range(1, MAX_SLOTS + 1):
        folder = root / (name if slot == 1 else f"{name}-{slot}")
        folder.mkdir(parents=True, exist_ok=True)
        lock = lock_alone(folder / ".lock")
        if lock is not None:
            return folder, lock
    raise LocalError(f"{MAX_SLOTS} nodes already keep states of this run in {root}; give this one another --home")


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
        stale = sorted((store.folder.stat().st_mtime, other) for other, store in self._stores.items() if other != name)
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
