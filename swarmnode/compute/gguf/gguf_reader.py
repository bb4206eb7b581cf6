"""Reader of GGUF files (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): the header in one pass, and tensors as views.

The package gguf makes a numpy view of each text of an array, which takes tens of seconds for a large vocabulary, and believes any
length and count. Here an array of texts stays a piece of the file until somebody asks for it.
"""

from __future__ import annotations

import math
import struct
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from swarmnode.compute.packing.tensor_entry import MAX_TOLD_CHARS
from swarmnode.errors import CheckpointError

MAGIC, VERSIONS = b"GGUF", (2, 3)
MAX_HEADER_BYTES = 128 << 20
MAX_HEADER_VALUES = 1 << 21
"""Keys, tensors and elements of arrays; a vocabulary of 262,144 tokens with its merges has 1.3 million"""
MAX_DIMENSIONS, MAX_NAME_BYTES = 4, 1 << 10
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Characters of the types of numbers for `struct` and numpy"""
PLAIN_DTYPES = {0: "f4", 1: "f2", 24: "i1", 25: "i2", 26: "i4", 27: "i8", 28: "f8"}
"""numpy's types of tensors without blocks, by GGUF's numbers"""
DEFAULT_ALIGNMENT, ALIGNMENT_KEY = 32, "general.alignment"


@dataclass(frozen=True, eq=False)
class GgufField:
    """Key of a header and its value, decoded at first use. `entry` has the bytes of both, `value` those of a value, or of the
    `count` elements of an array."""

    name: str
    kind: int
    element: int | None
    count: int
    entry: memoryview
    value: memoryview

    def contents(self) -> Any:
        """Return the value: a number, a text, or a list of them. Raises CheckpointError if a text is not UTF-8."""
        return self._contents

    @cached_property
    def _contents(self) -> Any:
        try:
            if self.kind == STRING:
                return str(self.value, "utf-8")
            if self.element == STRING:
                return self._texts()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"its {self.name} has a text that is not UTF-8 ({error.reason})") from error
        kind = SCALARS[self.kind if self.element is None else self.element]
        values: list[Any] = np.frombuffer(self.value, f"<{kind}", self.count).tolist()
        return values[0] if self.element is None else values

    def _texts(self) -> list[str]:
        raw, unpack, end, texts = self.value, struct.Struct("<Q").unpack_from, 0, []
        for _ in range(self.count):
            begin = end + 8
            end = begin + unpack(raw, end)[0]
            texts.append(str(raw[begin:end], "utf-8"))
        return texts

    # As transformers asks the fields of the package gguf.

    @property
    def types(self) -> list[int]:
        """Numbers of the value's type, and of an array's elements."""
        return [self.kind] if self.element is None else [self.kind, self.element]

    @property
    def parts(self) -> list[Any]:
        """The value, or each element of an array: a number in a numpy array, or the bytes of a text."""
        values = self.contents() if self.kind == ARRAY else [self.contents()]
        return [one.encode() if isinstance(one, str) else np.array([one]) for one in values]

    @property
    def data(self) -> range:
        """Places of the values in `parts`."""
        return range(self.count)


@dataclass(frozen=True, eq=False)
class GgufTensor:
    """Tensor of a file: its name, its shape with the outermost dimension first, its format (of the package gguf), and its place."""

    name: str
    shape: tuple[int, ...]
    tensor_type: Any
    n_bytes: int
    data_offset: int
    file: np.memmap[Any, Any]

    @property
    def n_elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def data(self) -> np.ndarray[Any, Any]:
        """View of the values (of `shape`), or of the bytes of the rows (…, bytes) for formats with blocks."""
        raw = self.file[self.data_offset : self.data_offset + self.n_bytes]
        dtype = PLAIN_DTYPES.get(int(self.tensor_type))
        return raw.reshape(*self.shape[:-1], -1) if dtype is None else raw.view(f"<{dtype}").reshape(self.shape)


class GgufReader:
    """Header of a GGUF file: `fields` by key, `tensors` in their order, the place of their bytes (`data_offset`).

    Raises CheckpointError if the file is none, is in the byte order of other machines, has another version, or if its header is
    damaged: lengths, counts or sizes beyond the file, too many values, values or formats of unknown types, a name twice.
    """

    def __init__(self, file: Path) -> None:
        self._file, self._size = file, file.stat().st_size
        with file.open("rb") as stream:
            if stream.read(len(MAGIC)) != MAGIC:
                raise CheckpointError(f"{file}: not a GGUF file")
        mapped = np.memmap(file, mode="r")
        self._at, self._values = len(MAGIC), 0
        self._raw = memoryview(mapped)[:MAX_HEADER_BYTES]  # type: ignore[arg-type]  # a memmap has the buffer interface
        version = self._number("I")
        if version & 0xFFFF == 0 or sys.byteorder != "little":
            raise CheckpointError(
                f"{file}: in the byte order of other machines; convert it with gguf-py's gguf-convert-endian"
            )
        if version not in VERSIONS:
            raise CheckpointError(
                f"{file}: a GGUF file of version {version}, which is unknown here; convert the model again with llama.cpp"
            )
        tensors, keys = self._count("Q", "tensors"), self._count("Q", "keys")
        self.fields: dict[str, GgufField] = {}
        for _ in range(keys):
            field = self._field()
            if field.kind == STRING:
                try:
                    field.contents()
                except CheckpointError as error:
                    raise CheckpointError(f"{file}: {error}: fetch the file again") from error
            if field.name in self.fields:
                self._fail(f"has the key {field.name[:MAX_TOLD_CHARS]} twice")
            self.fields[field.name] = field
        places = [self._tensor_place() for _ in range(tensors)]
        if len({name for name, *_ in places}) < len(places):
            self._fail("has two tensors of one name")
        alignment = self._alignment()
        self.data_offset = -(-self._at // alignment) * alignment
        self.tensors = [self._tensor(*place, mapped) for place in places]

    def _fail(self, what: str) -> NoReturn:
        """Raise CheckpointError: the header does `what`."""
        raise CheckpointError(f"{self._file}: its header {what}: it is damaged, or cut short: fetch the file again")

    def _number(self, kind: str) -> int:
        """Read a number of a type of `struct`."""
        begin, self._at = self._at, self._at + struct.calcsize(kind)
        if self._at > len(self._raw):
            self._fail("ends early" if self._size < MAX_HEADER_BYTES else f"has over {MAX_HEADER_BYTES >> 20} MiB")
        found: int = struct.unpack_from(f"<{kind}", self._raw, begin)[0]
        return found

    def _bytes(self, count: int, what: str) -> memoryview:
        """Read `count` bytes."""
        begin, self._at = self._at, self._at + count
        if self._at > len(self._raw):
            self._fail(f"has {what} of {count} bytes, more than the file or {MAX_HEADER_BYTES >> 20} MiB")
        return self._raw[begin : self._at]

    def _count(self, kind: str, what: str) -> int:
        """Read a number of values. All numbers together are limited."""
        count = self._number(kind)
        self._values += count
        if count > self._size or self._values > MAX_HEADER_VALUES:
            self._fail(f"says {count} {what}, more than are read ({MAX_HEADER_VALUES:,} in all)")
        return count

    def _name(self, what: str) -> str:
        length = self._number("Q")
        if not 0 < length <= MAX_NAME_BYTES:
            self._fail(f"has {what} with a name of {length} bytes")
        return str(self._bytes(length, what), "utf-8", errors="replace")

    def _field(self) -> GgufField:
        first, name = self._at, self._name("a key")
        kind, element, count = self._number("I"), None, 1
        if kind == ARRAY:
            element, count = self._number("I"), self._count("Q", "elements of an array")
        scalar = SCALARS.get(kind if element is None else element)
        begin = self._at
        if scalar is not None:
            self._bytes(count * struct.calcsize(scalar), "an array" if kind == ARRAY else "a number")
        elif element == STRING:
            self._pass_texts(count)
        elif kind == STRING:
            begin += 8
            self._bytes(self._number("Q"), "a text")
        else:
            self._fail(
                f"has {'an array of values' if kind == ARRAY else 'a value'} of type {kind if element is None else element}"
            )
        return GgufField(name, kind, element, count, self._raw[first : self._at], self._raw[begin : self._at])

    def _pass_texts(self, count: int) -> None:
        """Pass over the texts of an array."""
        raw, unpack, end = self._raw, struct.Struct("<Q").unpack_from, self._at
        last = len(raw) - 8
        for _ in range(count):
            if end > last:
                self._fail("ends early, or has a text that is longer than the file")
            end += 8 + unpack(raw, end)[0]
        self._bytes(end - self._at, "texts")

    def _tensor_place(self) -> tuple[str, tuple[int, ...], int, int]:
        """Read a tensor's name, shape, number of its format, and place behind the header."""
        name, dimensions = self._name("a tensor"), self._number("I")
        if not 0 < dimensions <= MAX_DIMENSIONS:
            self._fail(f"says {dimensions} dimensions of {name[:MAX_TOLD_CHARS]}")
        shape = tuple(reversed([self._number("Q") for _ in range(dimensions)]))
        self._values += 1
        return name, shape, self._number("I"), self._number("Q")

    def _alignment(self) -> int:
        field = self.fields.get(ALIGNMENT_KEY)
        alignment = DEFAULT_ALIGNMENT if field is None else field.contents()
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            self._fail(f"says an {ALIGNMENT_KEY} of {str(alignment)[:MAX_TOLD_CHARS]}, which is no power of two")
        return alignment

    def _tensor(
        self, name: str, shape: tuple[int, ...], number: int, offset: int, mapped: np.memmap[Any, Any]
    ) -> GgufTensor:
        import gguf

        told = name[:MAX_TOLD_CHARS]
        try:
            kind = gguf.GGMLQuantizationType(number)
        except ValueError as error:
            raise CheckpointError(
                f"{self._file}: {told} is in number format {number}, which is unknown here: upgrade gguf, or choose a file in "
                "another format"
            ) from error
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise CheckpointError(
                f"{self._file}: {told} with rows of {shape[-1]} is said to be in {kind.name}, whose blocks have {block}: its "
                "header is damaged; fetch the file again"
            )
        begin, nbytes = self.data_offset + offset, math.prod(shape) // block * block_bytes
        if 0 in shape or begin + nbytes > self._size:
            raise CheckpointError(
                f"{self._file}: cut short: fetch the file again; its header says {[*shape]} of {told} from byte {begin} on, and "
                f"the file has {self._size} bytes"
            )
        return GgufTensor(name, shape, kind, nbytes, begin, mapped)
