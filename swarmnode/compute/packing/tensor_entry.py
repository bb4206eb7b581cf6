"""Places of tensors in a checkpoint's files, and the tensors of GGUF files: their index, their bytes and their values.

`packed.json` gives each tensor of a GGUF file under the name that transformers' model has for it: format, shape and byte range. A
tensor that the model joins from several has an entry for each of them, NAME/0, NAME/1 and so on, in the order of their rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swarmnode.compute.packing.ggml import FORMATS, aligned, check_finite, dequantise
from swarmnode.errors import CheckpointError
from swarmnode.files import parse_json
from swarmnode.swarm.storage.content import GGUF_SUFFIX, PACKED_NAME

PART = "/"  # between the name of a tensor that was joined from several, and the number of one of these
MAX_TOLD_CHARS = 40
STORED_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
"""Dtypes by their names in safetensors"""


@dataclass(frozen=True)
class TensorEntry:
    """Place of one tensor: byte range [begin, end) of `file`, counted from the start of the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    heads: int = 0  # of a packed rotary projection whose rows llama.cpp has interleaved; 0: the rows are in order
    values: int | None = None  # of the parameter of a quantised tensor (0: its scales); None: it is not quantised
    memory: int | None = None  # bytes that it takes while it stays packed; None: as many as in the file

    @property
    def is_gguf(self) -> bool:
        """Whether the tensor is in a format of GGUF."""
        return self.file.name.endswith(GGUF_SUFFIX)

    @property
    def is_packed(self) -> bool:
        """Whether the tensor stays packed in memory: it is in a format of GGUF, or belongs to a quantised checkpoint."""
        return self.is_gguf or self.values is not None

    @property
    def is_stack(self) -> bool:
        """Whether the tensor has one matrix for each expert of a layer."""
        return len(self.shape) == 3

    @property
    def elements(self) -> int:
        """Number of elements, of a quantised tensor those of the parameter that it stands for."""
        return math.prod(self.shape) if self.values is None else self.values

    @property
    def packed_bytes(self) -> int:
        """Bytes that it takes in memory while it stays packed."""
        return self.nbytes if self.memory is None else self.memory

    @property
    def nbytes(self) -> int:
        """Size in the file in bytes."""
        return self.end - self.begin


def packed_entries(path: Path) -> dict[str, TensorEntry]:
    """Return the packed tensors of the index in folder `path`; none without an index. Raises CheckpointError if it is damaged."""
    index = path / PACKED_NAME
    if not index.is_file():
        return {}
    tensors = read_json(index).get("tensors")
    if not isinstance(tensors, dict):
        raise CheckpointError(f"{index}: has no table of tensors")
    entries = {name: _packed_entry(index, name, value) for name, value in tensors.items()}
    for name, parts in parts_by_parameter(entries).items():
        if len({(part.shape[:-2], part.shape[-1]) for part in parts}) > 1 or (name in entries and len(parts) > 1):
            raise CheckpointError(f"{index}: the parts of {name[:MAX_TOLD_CHARS]} do not fit together")
    return entries


def _packed_entry(index: Path, name: str, value: Any) -> TensorEntry:
    try:
        file, form, shape = index.parent / value["file"], FORMATS[value["format"]], tuple(value["shape"])
        entry = TensorEntry(file, form.name, shape, value["begin"], value["end"], value.get("heads", 0))
        numbers = [*shape, entry.begin, entry.end, entry.heads]
        if not all(type(number) is int and number >= 0 for number in numbers) or len(shape) not in (2, 3):
            raise ValueError("it has numbers that are no sizes")
        form.check_shape(shape)
        wanted_bytes = math.prod(shape[:-1]) * form.row_bytes(shape[-1])
        turns = entry.heads == 0 or (len(shape) == 2 and shape[0] % (2 * entry.heads) == 0)
    except (KeyError, TypeError, ValueError) as error:
        told = f": {error}" if type(error) is ValueError else ""
        raise CheckpointError(f"{index}: the entry for {name[:MAX_TOLD_CHARS]} is damaged{told}") from None
    if (
        entry.nbytes != wanted_bytes
        or not turns
        or file.suffix != GGUF_SUFFIX
        or Path(value["file"]).name != value["file"]
    ):
        raise CheckpointError(f"{index}: the entry for {name[:MAX_TOLD_CHARS]} contradicts itself")
    if not file.is_file():
        raise CheckpointError(f"{file}: missing; it has the packed weights")
    if (size := file.stat().st_size) < entry.end:
        raise CheckpointError(f"{file}: truncated: {name} ends at byte {entry.end}, the file at {size}")
    return entry


def read_bytes(entry: TensorEntry) -> Tensor:
    """Return the bytes of a tensor (uint8) in memory of their own: a mapped file that is cut short would end the process.

    Raises CheckpointError if the file cannot be read, or is shorter than when it was opened.
    """
    packed_B = aligned(entry.nbytes)
    try:
        with entry.file.open("rb", buffering=0) as stream:
            stream.seek(entry.begin)
            view, filled = memoryview(packed_B.numpy().data), 0
            while filled < entry.nbytes and (size := stream.readinto(view[filled:])):
                filled += size
    except OSError as error:
        raise CheckpointError(f"{entry.file}: cannot be read: {error.strerror or error}") from error
    if filled < entry.nbytes:
        raise CheckpointError(f"{entry.file}: was cut short while it was read")
    return packed_B


def read_packed(entry: TensorEntry, name: str) -> Tensor:
    """Return the packed rows (..., bytes of a row) of the tensor `name` as uint8, in the order of the model's outputs.

    Raises CheckpointError if the file cannot be read, is shorter than when it was opened, or holds values that are no finite
    numbers: a hostile founder does not look at them.
    """
    packed_B, form = read_bytes(entry), FORMATS[entry.dtype]
    check_finite(packed_B, form, f"{entry.file}: {name}")
    return in_transformers_order(packed_B.view(*entry.shape[:-1], form.row_bytes(entry.shape[-1])), entry.heads)


def in_transformers_order(rows_OB: Tensor, heads: int) -> Tensor:
    """Return the rows of a rotary projection in transformers' order. llama.cpp interleaves the two halves of each head; 0 heads:
    the order is the same."""
    if not heads:
        return rows_OB
    outputs = len(rows_OB)
    return rows_OB.view(heads, outputs // heads // 2, 2, -1).transpose(1, 2).reshape(outputs, -1)


class LazyTensor:
    """Tensor that is read when it is asked for, with the interface of a safetensors slice. `dtype` is a name in safetensors."""

    def __init__(self, dtype: str, shape: Callable[[], Sequence[int]], read: Callable[[], Tensor]) -> None:
        self._dtype, self._shape, self._read = dtype, shape, read

    def __getitem__(self, index: Any) -> Tensor:
        return self._read()[index]

    def get_shape(self) -> list[int]:
        """Return the shape. Raises CheckpointError if it is that of damaged quantised tensors."""
        return list(self._shape())

    def get_dtype(self) -> str:
        """Return the name of the dtype in safetensors."""
        return self._dtype


def file_slice(entry: TensorEntry) -> LazyTensor:
    """Return a tensor of a safetensors file, to be read into memory of its own. Reading raises CheckpointError as `read_bytes`
    does, or if the dtype is unknown."""

    def read() -> Tensor:
        if entry.dtype not in STORED_DTYPES:
            raise CheckpointError(f"{entry.file}: has tensors of type {entry.dtype}, which are not read here")
        return read_bytes(entry).view(STORED_DTYPES[entry.dtype]).view(entry.shape)

    return LazyTensor(entry.dtype, lambda: entry.shape, read)


def parts_by_parameter(entries: Mapping[str, TensorEntry]) -> dict[str, list[TensorEntry]]:
    """Return the packed tensors by the names of the model's parameters that they make."""
    parts: dict[str, list[TensorEntry]] = {}
    for name in sorted(entries):
        parts.setdefault(name.partition(PART)[0], []).append(entries[name])
    return parts


def packed_slices(entries: Mapping[str, TensorEntry]) -> dict[str, LazyTensor]:
    """Return the parameters that these packed tensors make, nothing read yet. Reading raises CheckpointError as `read_packed`."""

    def packed_slice(name: str, parts: Sequence[TensorEntry]) -> LazyTensor:
        *stacked, _, inputs = parts[0].shape
        shape = (*stacked, sum(part.shape[-2] for part in parts), inputs)

        def read() -> Tensor:
            whole = [values(part, name) for part in parts]
            return whole[0] if len(whole) == 1 else torch.cat(whole, dim=-2)  # a single one is not copied

        return LazyTensor("F32", lambda: shape, read)

    def values(part: TensorEntry, name: str) -> Tensor:
        packed = read_packed(part, name).reshape(-1)
        return dequantise(packed, FORMATS[part.dtype], part.elements).view(part.shape)

    return {name: packed_slice(name, parts) for name, parts in parts_by_parameter(entries).items()}


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises CheckpointError if the file cannot be read or holds something else."""
    try:
        values = parse_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: not readable as JSON: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{file}: not a JSON object")
    return values
