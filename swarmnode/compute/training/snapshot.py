"""Snapshots: the state of a block as a safetensors file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from swarmnode.compute.model.tensor_file import write_tensors
from swarmnode.compute.training.learner import Learner
from swarmnode.errors import CheckpointError, LocalError, UsageError
from swarmnode.files import parse_json
from swarmnode.swarm.storage.states import StateStore

STATE_FILE, BLOCK_FILE = "state.json", "block-{}.safetensors"


def write_step(store: StateStore, step: int, states: Mapping[int, Mapping[str, Tensor]]) -> None:
    """Store the states of these blocks (`Learner.state`) as a step. Raises LocalError if the disk is full."""
    run = store.run.id
    store.write(step, states, lambda block, path: write_block(path, states[block], step=step, block=block, run=run))


def read_step(store: StateStore, step: int, blocks: Iterable[int]) -> dict[int, dict[str, Tensor]]:
    """Return the states of blocks at a step, mapped from files with checked hashes. Raises CheckpointError."""
    run = store.run.id
    return {block: read_block(store.path(step, block), step=step, block=block, run=run) for block in blocks}


def write_block(path: Path, tensors: Mapping[str, Tensor], *, step: int, block: int, run: bytes) -> None:
    """Write the state of a block at the beginning of a step. Raises OSError."""
    write_tensors(path, tensors, _metadata(step, block, run))


def read_block(path: Path, *, step: int, block: int, run: bytes) -> dict[str, Tensor]:
    """Return the state in a file, mapped: pages are read when touched. Raises CheckpointError if it is damaged or another state."""
    from safetensors import SafetensorError, safe_open

    try:
        file: Any = safe_open(path, framework="pt")
        found = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not readable as a training state: {error}; fetch it again") from error
    for key, wanted in _metadata(step, block, run).items():
        if found.get(key) != wanted:
            raise CheckpointError(f"{path}: a state of {key} {found.get(key)}, not {wanted}; fetch it again")
    return tensors


class LocalState:
    """Folder with the state of a training in one process: a file for each block, and `state.json` with its run and step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._partial, self._old = (folder.parent / f".{folder.name}.{end}" for end in ("partial", "old"))

    def __repr__(self) -> str:
        return f"LocalState({self.folder})"

    def load(self, learner: Learner) -> None:
        """Let a learner go on from the state; do nothing if the folder does not exist or is empty. A state that was being replaced
        when the process was killed is put back.

        Raises UsageError if the folder holds another run's state or something else, CheckpointError if the state is damaged.
        """
        if not self.folder.exists() and self._old.exists():
            self._old.rename(self.folder)
        if not self.folder.exists() or not any(self.folder.iterdir()):
            return
        try:
            told = parse_json((self.folder / STATE_FILE).read_bytes())
            step, run = int(told["step"]), str(told["run"])
        except (OSError, ValueError, KeyError, TypeError):
            raise UsageError(f"{self.folder} holds no state of a training; name another folder") from None
        if run != learner.run.id.hex():
            raise UsageError(
                f"{self.folder} holds the state of a training with other settings or data; give those, or another folder"
            )
        for block in learner.blocks:
            path = self.folder / BLOCK_FILE.format(block)
            learner.load(block, read_block(path, step=step, block=block, run=learner.run.id))
        learner.step = step

    def save(self, learner: Learner) -> None:
        """Write the state of a learner between two steps, in place of the one before. Raises LocalError if it cannot be written."""
        partial, old = self._partial, self._old
        try:
            for left in (partial, old):
                shutil.rmtree(left, ignore_errors=True)
            partial.mkdir(parents=True)
            for block in learner.blocks:
                path = partial / BLOCK_FILE.format(block)
                write_block(path, learner.state(block), step=learner.step, block=block, run=learner.run.id)
            (partial / STATE_FILE).write_text(json.dumps({"step": learner.step, "run": learner.run.id.hex()}))
            if self.folder.exists():
                self.folder.rename(old)
            partial.rename(self.folder)
            shutil.rmtree(old, ignore_errors=True)
        except OSError as error:
            raise LocalError(f"cannot write {self.folder}: {error.strerror or error}; choose another folder") from None


def _metadata(step: int, block: int, run: bytes) -> dict[str, str]:
    return {"step": str(step), "block": str(block), "run": run.hex()}
