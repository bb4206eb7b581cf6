"""Dequantised tensors written as the shards of a plain checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from swarmnode.compute.model.tensor_file import ShardWriter
from swarmnode.errors import CheckpointError
from swarmnode.swarm.storage.content import Progress


def write_plain(tensors: Iterable[tuple[str, Tensor]], out: Path, total_bytes: int, progress: Progress | None) -> None:
    """Write tensors of about `total_bytes` by their names into the empty folder `out`, as they come. Raises CheckpointError if one
    holds values that are no finite numbers, OSError."""
    writer = ShardWriter(out)
    for name, tensor in tensors:
        if not tensor.isfinite().all():
            raise CheckpointError(f"{name} holds values that are no finite numbers: its scales are damaged")
        writer.add(name, tensor)
        if progress is not None:
            progress(min(writer.written_bytes, total_bytes), total_bytes)
    writer.close()
