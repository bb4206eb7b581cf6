"""Snapshots: the state of a block as a safetensors file.

Written tensor by tensor: safetensors' own `save_file` first copies all of them into memory. The format is documented in
https://github.com/huggingface/safetensors#format: length of the header (8 bytes), header (JSON), tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swarmnode.errors import CheckpointError
from swarmnode.swarm.storage.states import StateStore

HEADER_ALIGNMENT = 8
DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def write_step(store: StateStore, step: int, states: Mapping[int, Mapping[str, Tensor]]) -> None:
    """Keep the states of these blocks (`Learner.state`) as a step. Raises LocalError where the disk is full."""
    run = store.run.id
    store.write(step, states, lambda block, path: write_block(path, states[block], step=step, block=block, run=run))


def read_step(store: StateStore, step: int, blocks: Iterable[int]) -> dict[int, dict[str, Tensor]]:
    """The states of blocks at a step, mapped from files whose hashes were checked. Raises CheckpointError."""
    run = store.run.id
    return {block: read_block(store.path(step, block), step=step, block=block, run=run) for block in blocks}


def write_block(path: Path, tensors: Mapping[str, Tensor], *, step: int, block: int, run: bytes) -> None:
    """Write the state of a block at the beginning of a step. Raises OSError."""
    write_tensors(path, tensors, _metadata(step, block, run))


def read_block(path: Path, *, step: int, block: int, run: bytes) -> dict[str, Tensor]:
    """The state in a file, mapped: pages are read when they are touched. Raises CheckpointError where it is another state."""
    from safetensors import SafetensorError, safe_open

    try:
        file: Any = safe_open(path, framework="pt")
        found = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not readable as a training state: {error}") from error
    for key, wanted in _metadata(step, block, run).items():
        if found.get(key) != wanted:
            raise CheckpointError(f"{path}: a state of {key} {found.get(key)}, not {wanted}")
    return tensors


def _metadata(step: int, block: int, run: bytes) -> dict[str, str]:
    return {"step": str(step), "block": str(block), "run": run.hex()}


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file, one tensor in memory at a time where they come from a device or a map. Raises OSError.

    Equal tensors give equal bytes: the largest items first (so that all are aligned), then by name.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    position = 0
    for name in names:
        tensor = tensors[name]
        offsets = [position, position + tensor.nbytes]
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        position = offsets[1]
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % HEADER_ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little"))
        file.write(raw)
        for name in names:
            flat = tensors[name].detach().cpu().contiguous().view(-1)
            file.write(flat.view(torch.uint8).numpy().data)
