"""Which chunks of a safetensors file hold what is wanted of it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnode.swarm.storage.content import CHUNK_BYTES, FileContent

if TYPE_CHECKING:
    from swarmnode.compute.model.checkpoint import TensorEntry

HEADER_LENGTH_BYTES = 8


def header_chunks(path: Path, file: FileContent) -> range:
    """Those of its header; its first 8 bytes, which are here, say how long that is."""
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(HEADER_LENGTH_BYTES), "little")
    return range(min(file.chunks(), -(-(HEADER_LENGTH_BYTES + length) // CHUNK_BYTES)))


def chunks_of(tensors: Iterable[TensorEntry]) -> set[int]:
    """Those in which these tensors of a file lie."""
    return {
        number
        for tensor in tensors
        if tensor.end > tensor.begin
        for number in range(tensor.begin // CHUNK_BYTES, (tensor.end - 1) // CHUNK_BYTES + 1)
    }
