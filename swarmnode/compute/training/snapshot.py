"""Snapshots: the state of a block as a safetensors file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from swarmnode.compute.model.tensor_file import write_tensors
from swarmnode.errors import CheckpointError
from swarmnode.swarm.storage.states import StateStore


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


def _metadata(step: int, block: int, run: bytes) -> dict[str, str]:
    return {"step": str(step), "block": str(block), "run": run.hex()}
