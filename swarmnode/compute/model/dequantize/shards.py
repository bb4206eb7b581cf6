"""Shards of a checkpoint written as its tensors come, so that no more than one shard is in memory."""

from __future__ import annotations

import json
from pathlib import Path

from torch import Tensor

from swarmnode.compute.model.checkpoint import INDEX_FILE, SINGLE_FILE
from swarmnode.compute.training.snapshot import write_tensors
from swarmnode.errors import CheckpointError

SHARD_BYTES = 1 << 30


class ShardWriter:
    """Into the empty folder `out`; each file has `shard_bytes` or one tensor, and the last what is left. Raises OSError."""

    def __init__(self, out: Path, shard_bytes: int = SHARD_BYTES) -> None:
        self._out, self._shard_bytes = out, shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._shards: list[list[str]] = []
        self.written_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """One more tensor. Raises CheckpointError where its values are no numbers."""
        if not tensor.isfinite().all():
            raise CheckpointError(f"{name} holds values that are no finite numbers: its scales are damaged")
        if self._pending and sum(each.nbytes for each in self._pending.values()) + tensor.nbytes > self._shard_bytes:
            self._flush()
        self._pending[name] = tensor.contiguous()
        self.written_bytes += tensor.nbytes

    def close(self) -> None:
        """Write what is left, and an index where there are several files."""
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
        """A shard whose name waits for how many there are."""
        return self._out / f"shard-{number}.safetensors"
