"""Snapshots: the state of a block as a safetensors file.

Gathers the trained tensors of all blocks into one checkpoint, as `save_pretrained` would write it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swarmnode.compute.model.checkpoint import CONFIG_FILE, INDEX_FILE, Checkpoint, load_config
from swarmnode.compute.model.checkpoint_writer import ShardWriter, write_tensors
from swarmnode.compute.model.lean import lean
from swarmnode.compute.training.block import EMA
from swarmnode.compute.training.learner import Learner
from swarmnode.errors import CheckpointError, LocalError, UsageError
from swarmnode.files import parse_json
from swarmnode.swarm.storage.content import SMALL_NAMES, TOKENIZER_NAMES
from swarmnode.swarm.storage.state_store import StateStore

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


SHARD_BYTES = 5_000_000_000
PARTS = ("parameter/", "buffer/", f"{EMA}/")  # of a block's state; the last take the place of the first


def gather(files: Iterable[Path], *, average: bool = True) -> dict[str, Tensor]:
    """Return parameters and buffers in the states of blocks, by their names in the state dict, mapped from the files.

    With `average`, a parameter's exponential moving average takes its place if the run keeps one. Raises CheckpointError if a file
    cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, Tensor] = {}
    for path in files:
        try:
            file: Any = safe_open(path, framework="pt")
            for part in PARTS if average else PARTS[:-1]:
                for key in file.keys():  # noqa: SIM118  (no mapping)
                    if key.startswith(part):
                        tensors[key.removeprefix(part)] = file.get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: not readable as a training state: {error}; fetch it again") from error
    return tensors


def write_language_model(tensors: Mapping[str, Tensor], small_files: Path, out: Path) -> None:
    """Write the files that `from_pretrained` reads into the empty folder `out`; `small_files` has config and tokenizer.

    Raises CheckpointError if the tensors are not those of the model, OSError.
    """
    check_names(tensors, small_files)
    for name in SMALL_NAMES - {INDEX_FILE}:
        if (small_files / name).is_file():
            shutil.copyfile(small_files / name, out / name)
    values = parse_json((small_files / CONFIG_FILE).read_bytes())
    values.pop("torch_dtype", None)  # the older name of the next one
    values["dtype"] = "float32"  # training is in float32
    (out / CONFIG_FILE).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
    write_shards(tensors, out)


def write_module(tensors: Mapping[str, Tensor], founded: Path, out: Path) -> None:
    """Write the files that `load_state_dict` takes: trained tensors, and the others as the swarm was founded with them.

    `founded` is the folder of the founded checkpoint. A tensor that the module has under two names is written once, and constants
    of its code are written, too, so load with `strict=False`. For a language model, config and tokenizer are written as well.
    Raises CheckpointError if the states hold an unknown tensor.
    """
    checkpoint = Checkpoint(founded)
    unknown = sorted(tensors.keys() - checkpoint.entries.keys())
    if unknown:
        raise CheckpointError(
            f"the states hold {unknown[0]}, which the swarm's module does not have: they belong to another swarm"
        )
    for name in sorted({CONFIG_FILE, *TOKENIZER_NAMES}):
        if (founded / name).is_file():
            shutil.copyfile(founded / name, out / name)
    write_shards({**checkpoint.read(checkpoint.tensor_names), **tensors}, out)


@lean()
def check_names(tensors: Mapping[str, Tensor], small_files: Path) -> None:
    """Raise CheckpointError unless these are all tensors of the model that the config describes, tied ones once."""
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(load_config(small_files / CONFIG_FILE))
    expected = {name: tensor for name, tensor in model.state_dict().items() if name not in model.all_tied_weights_keys}
    for name in sorted(expected.keys() ^ tensors.keys()):
        raise CheckpointError(
            f"the states {'lack' if name in expected else 'hold an unknown'} "
            f"tensor {name}: they belong to another model"
        )
    for name, tensor in expected.items():
        if tensor.shape != tensors[name].shape:
            raise CheckpointError(
                f"the states hold {name} of shape {tuple(tensors[name].shape)}, "
                f"not {tuple(tensor.shape)}: they belong to another model"
            )


def write_shards(tensors: Mapping[str, Tensor], out: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Write model.safetensors, or shards of at most `shard_bytes` (or one tensor) with an index. Raises OSError."""
    writer = ShardWriter(out, shard_bytes)
    for name, tensor in sorted(tensors.items()):
        writer.add(name, tensor)
    writer.close()
