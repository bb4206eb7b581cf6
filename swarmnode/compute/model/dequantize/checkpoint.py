"""Quantised safetensors checkpoints, written as plain ones, one matrix at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swarmnode.compute.model.checkpoint import CONFIG_FILE, Checkpoint
from swarmnode.compute.model.family import KEYS, family_of, plain_config
from swarmnode.compute.model.packing.quantised_weights import QuantisedTensors, dequantised
from swarmnode.compute.model.tensor_file import ShardWriter
from swarmnode.errors import CheckpointError
from swarmnode.files import parse_json
from swarmnode.swarm.storage.content import INDEX_NAME, SMALL_NAMES, Progress

DTYPES = {"float32": torch.float32, "float16": torch.float16}


def write_plain(tensors: Iterable[tuple[str, Tensor]], out: Path, total_bytes: int, progress: Progress | None) -> None:
    """Write tensors of about `total_bytes` into the empty folder `out`, in the order given.

    Raises CheckpointError if a tensor holds values that are not finite, OSError.
    """
    writer = ShardWriter(out)
    for name, tensor in tensors:
        if not tensor.isfinite().all():
            raise CheckpointError(
                f"{name} holds values that are no finite numbers: its scales are damaged; fetch the checkpoint again"
            )
        writer.add(name, tensor)
        if progress is not None:
            progress(min(writer.written_bytes, total_bytes), total_bytes)
    writer.close()


class QuantisedCheckpoint:
    """Quantised checkpoint of a causal language model, whose files are all local. Raises CheckpointError if not supported."""

    def __init__(self, checkpoint: Checkpoint, settings: Mapping[str, Any]) -> None:
        self._checkpoint = checkpoint
        self._quantised = checkpoint.quantised or QuantisedTensors(checkpoint.path, settings, checkpoint.entries)
        config = plain_config(checkpoint.config)
        family_of(config)
        self._dtype = DTYPES.get(str(config.dtype).removeprefix("torch."), torch.bfloat16)

    @property
    def plain_bytes(self) -> int:
        """Size of the plain weights in bytes."""
        entries = self._quantised.marked
        packed = sum(entries[name].elements for name in self._quantised.packed)
        return packed * self._dtype.itemsize + sum(entries[name].nbytes for name in self._quantised.plain_names)

    def write(self, out: Path, progress: Progress | None = None) -> None:
        """Write config, tokenizer and plain weights into the empty folder `out`. Raises CheckpointError, OSError."""
        for name in SMALL_NAMES - {CONFIG_FILE, INDEX_NAME}:
            if (self._checkpoint.path / name).is_file():
                shutil.copyfile(self._checkpoint.path / name, out / name)
        values = parse_json((self._checkpoint.path / CONFIG_FILE).read_bytes())
        kept = {key: value for key, value in values.items() if key not in KEYS}
        (out / CONFIG_FILE).write_text(json.dumps(kept, indent=2) + "\n")
        write_plain(self._tensors(), out, self.plain_bytes, progress)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        quantised = self._quantised
        for name in self._checkpoint.entries:
            if name in quantised.packed:
                tensors = self._checkpoint.open_slices([name, *quantised.companions(name).values()])
                matrix = quantised.matrix(name, tensors)
                yield quantised.parameter(name), dequantised(quantised.method, matrix).to(self._dtype)
            elif name not in quantised.beside:
                yield name, self._checkpoint.read([name])[name]
