"""Writer of GGUF files (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): the header first, then the tensors in order."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import IO

from torch import Tensor

from swarmnode.compute.model.packing.ggml import Format

MAGIC, VERSION = b"GGUF", 3
ALIGNMENT = 32
UINT32, STRING = 4, 8  # numbers of value types


def _text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key_of_text(key: str, value: str) -> bytes:
    """Return a key with a text, as a GGUF file has it."""
    return _text(key) + struct.pack("<I", STRING) + _text(value)


def key_of_number(key: str, value: int) -> bytes:
    """Return a key with an unsigned number of 32 bits, as a GGUF file has it."""
    return _text(key) + struct.pack("<II", UINT32, value)


@dataclass(frozen=True)
class NewTensor:
    """Tensor to be written: its name, its shape with the outermost dimension first, GGUF's number of its format, and its bytes."""

    name: str
    shape: tuple[int, ...]
    form: int
    nbytes: int

    @classmethod
    def packed(cls, name: str, shape: tuple[int, ...], form: Format) -> NewTensor:
        """Describe a tensor in a format that is kept packed. Raises ValueError if a row has no whole blocks."""
        return cls(name, shape, form.number, math.prod(shape[:-1]) * form.row_bytes(shape[-1]))


class GgufWriter:
    """Writer of one GGUF file into the open file `out`: keys as they are in a file, then `tensors`, whose bytes are added in order.

    Raises OSError.
    """

    def __init__(self, out: IO[bytes], keys: Sequence[bytes], tensors: Sequence[NewTensor]) -> None:
        self._out = out
        header = MAGIC + struct.pack("<IQQ", VERSION, len(tensors), len(keys)) + b"".join(keys)
        offset, offsets = 0, list[int]()
        for tensor in tensors:
            sizes = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *reversed(tensor.shape))
            header += _text(tensor.name) + sizes + struct.pack("<IQ", tensor.form, offset)
            offsets.append(offset)
            offset += tensor.nbytes + -tensor.nbytes % ALIGNMENT
        header += bytes(-len(header) % ALIGNMENT)
        self.begins = [len(header) + place for place in offsets]
        self.total_bytes = len(header) + offset
        out.write(header)

    def add(self, tensor: NewTensor, pieces: Iterable[Tensor]) -> None:
        """Write the next tensor, whose bytes are those of the `pieces`. Raises ValueError if their number is another one."""
        written = 0
        for piece in pieces:
            self._out.write(piece.contiguous().view(-1).numpy().data)
            written += piece.nbytes
        if written != tensor.nbytes:
            raise ValueError(f"{tensor.name} has {written} bytes, not {tensor.nbytes}")
        self._out.write(bytes(-written % ALIGNMENT))
