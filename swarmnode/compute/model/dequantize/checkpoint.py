"""Quantised safetensors checkpoints, written as plain ones, one matrix at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swarmnode.compute.model.checkpoint import CONFIG_FILE, Checkpoint
from swarmnode.compute.model.dequantize.methods import Method, PackedMatrix, method_of
from swarmnode.compute.model.family import KEYS, family_of
from swarmnode.compute.model.tensor_file import ShardWriter
from swarmnode.errors import CheckpointError
from swarmnode.swarm.storage.content import INDEX_NAME, SMALL_NAMES, Progress

DTYPES = {"float32": torch.float32, "float16": torch.float16}
PACKED_DTYPES = frozenset({"I8", "U8", "I32", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4"})


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
        self._checkpoint, self._settings = checkpoint, settings
        self._method: Method = method_of(settings)
        config = deepcopy(checkpoint.config)
        for key in KEYS:
            config.__dict__.pop(key, None)
        family_of(config)
        self._dtype = DTYPES.get(str(config.dtype).removeprefix("torch."), torch.bfloat16)
        entries = checkpoint.entries
        self._packed = {name for name, entry in entries.items() if self._method.packs(name, entry)}
        self._beside = {
            self._method.stem(name) + suffix for name in self._packed for suffix in self._method.beside
        } & entries.keys()
        self._packed -= self._beside  # quantised scales look like packed weights, too
        self._check()

    def _check(self) -> None:
        if not self._packed:
            raise CheckpointError(
                f"{self._checkpoint.path}: its config says quantised, but no tensor is; fetch the checkpoint again"
            )
        suffixes = tuple(suffix for suffix in self._method.beside if suffix.startswith("."))
        for name in self._plain_names():
            if suffixes and name.endswith(suffixes):
                raise CheckpointError(
                    f"{name} is there, but the packed weight that it belongs to is missing; fetch the checkpoint again"
                )
            dtype = self._checkpoint.entries[name].dtype
            if name.endswith("weight") and dtype in PACKED_DTYPES:
                raise CheckpointError(
                    f"{name} is {dtype}, which is not how its "
                    "quantization_config packs weights; fetch the checkpoint again"
                )

    @property
    def plain_bytes(self) -> int:
        """Size of the plain weights in bytes."""
        entries, element_bytes = self._checkpoint.entries, self._dtype.itemsize
        packed = sum(int(entries[name].elements * self._method.per_element) for name in self._packed)
        return packed * element_bytes + sum(entries[name].nbytes for name in self._plain_names())

    def write(self, out: Path, progress: Progress | None = None) -> None:
        """Write config, tokenizer and plain weights into the empty folder `out`. Raises CheckpointError, OSError."""
        for name in SMALL_NAMES - {CONFIG_FILE, INDEX_NAME}:
            if (self._checkpoint.path / name).is_file():
                shutil.copyfile(self._checkpoint.path / name, out / name)
        values = json.loads((self._checkpoint.path / CONFIG_FILE).read_bytes())
        kept = {key: value for key, value in values.items() if key not in KEYS}
        (out / CONFIG_FILE).write_text(json.dumps(kept, indent=2) + "\n")
        write_plain(self._tensors(), out, self.plain_bytes, progress)

    def _plain_names(self) -> list[str]:
        return [name for name in self._checkpoint.entries if name not in self._packed and name not in self._beside]

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name in self._checkpoint.entries:
            if name in self._packed:
                yield self._method.stem(name) + self._method.plain_end, self._dequantized(name)
            elif name not in self._beside:
                yield name, self._checkpoint.read([name])[name]

    def _dequantized(self, name: str) -> Tensor:
        stem = self._method.stem(name)
        names = {suffix: stem + suffix for suffix in self._method.beside if stem + suffix in self._beside}
        read = self._checkpoint.read([name, *names.values()])
        matrix = PackedMatrix(name, read[name], {suffix: read[full] for suffix, full in names.items()}, self._settings)
        try:
            return self._method.dequantize(matrix).to(self._dtype)
        except (ValueError, TypeError, RuntimeError, LookupError) as error:
            raise CheckpointError(f"{name} cannot be dequantised: {error}; use the model's plain weights") from error
