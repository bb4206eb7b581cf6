"""Quantised safetensors checkpoints, written as plain ones, one matrix at a time.

Writers of safetensors files, one tensor in memory at a time (safetensors' own `save_file` first copies all of them), and of
checkpoints of such files, one shard in memory at a time.

The format is the length of the header (8 bytes), the header (JSON), then the tensors:
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swarmnode.compute.model.checkpoint import CONFIG_FILE, INDEX_FILE, SINGLE_FILE, Checkpoint
from swarmnode.compute.model.family import KEYS, family_of, plain_config
from swarmnode.compute.model.quantised_weights import QuantisedTensors, dequantised
from swarmnode.compute.packing.tensor_entry import STORED_DTYPES
from swarmnode.errors import CheckpointError
from swarmnode.files import parse_json
from swarmnode.swarm.storage.content import INDEX_NAME, SMALL_NAMES, Progress

SHARD_BYTES = 1 << 30
HEADER_ALIGNMENT = 8
DTYPE_NAMES = {dtype: name for name, dtype in STORED_DTYPES.items()}


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file, with one tensor in memory at a time if they lie on a device or in mapped files. Raises OSError.

    Equal tensors give equal bytes: they are written by item size, the largest first (so that all are aligned), then by name.
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


class ShardWriter:
    """Writer of a checkpoint into the empty folder `out`, in files of up to `shard_bytes`, or one larger tensor.

    Raises OSError.
    """

    def __init__(self, out: Path, shard_bytes: int = SHARD_BYTES) -> None:
        self._out, self._shard_bytes = out, shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._shards: list[list[str]] = []
        self.written_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Write one more tensor, or keep it until its shard is full."""
        if self._pending and sum(each.nbytes for each in self._pending.values()) + tensor.nbytes > self._shard_bytes:
            self._flush()
        self._pending[name] = tensor.contiguous()
        self.written_bytes += tensor.nbytes

    def close(self) -> None:
        """Write the remaining tensors, and an index if there are several files."""
        self._flush()
        count = len(self._shards)
        names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        names = [SINGLE_FILE] if count == 1 else names
        for number, name in enumerate(names):
            self._shard(number).rename(self._out / name)
        if count > 1:
            weight_map = {tensor: name for name, shard in zip(names, self._shards, strict=True) for tensor in shard}
            index = {"metadata": {"total_size": self.written_bytes}, "weight_map": dict(sorted(weight_map.items()))}
            (self._out / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")

    def _flush(self) -> None:
        write_tensors(self._shard(len(self._shards)), self._pending, {"format": "pt"})
        self._shards.append(list(self._pending))
        self._pending = {}

    def _shard(self, number: int) -> Path:
        """Return the temporary path of a shard: its final name needs the number of shards."""
        return self._out / f"shard-{number}.safetensors"


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
