"""Rows of equal length out of samples of any length, and arrays in .npz files, read within a bound of memory."""

from __future__ import annotations

import hashlib
import math
import zipfile
from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import psutil
from numpy.lib import format as npy

from swarmnode.data.samples import TokenSample
from swarmnode.errors import UsageError

NO_LABEL = -100
PADDING = 0  # any token: what follows a document is never seen by it
MAX_TOKENS = 1 << 36


@dataclass(frozen=True)
class Rows:
    """Rows of tokens, all of one length.

    `ids_NT` (uint32) are tokens, `labels_NT` (int32) the same or -100 where no label counts, and `positions_NT` (int32) the places
    of the tokens in their samples: each sample begins with 0. `held_N2` counts the samples and the tokens in each row, `cut`
    those of the samples that were longer than a row, and `left_out` the samples that have no label within a row.
    """

    ids_NT: np.ndarray
    labels_NT: np.ndarray
    positions_NT: np.ndarray
    held_N2: np.ndarray
    cut: int
    left_out: int
    is_packed: bool

    def split(self, share: float) -> tuple[Rows, Rows]:
        """Return the first rows, and the last ones, which are that `share` of all (at least one row each).

        Raises UsageError if there are fewer than two rows.
        """
        count = len(self.ids_NT)
        if count < 2:
            raise UsageError("the data fill one row, so none can be held out; give more data or --eval-data")
        cut = min(count - 1, max(1, round(count * (1 - share))))
        return self._part(slice(0, cut)), self._part(slice(cut, count))

    def _part(self, rows: slice) -> Rows:
        return Rows(
            self.ids_NT[rows], self.labels_NT[rows], self.positions_NT[rows], self.held_N2[rows], 0, 0, self.is_packed
        )

    @property
    def samples(self) -> int:
        """Number of samples in the rows."""
        return int(self.held_N2[:, 0].sum())

    @property
    def tokens(self) -> int:
        """Number of the samples' tokens in the rows, without padding."""
        return int(self.held_N2[:, 1].sum())

    @property
    def fingerprint(self) -> bytes:
        """SHA-256 of the rows."""
        digest = hashlib.sha256(f"rows {self.ids_NT.shape} {self.is_packed}\n".encode())
        for tensor, dtype in ((self.ids_NT, "<u4"), (self.labels_NT, "<i4"), (self.positions_NT, "<i4")):
            digest.update(np.ascontiguousarray(tensor, dtype=dtype).data)
        return digest.digest()


class _Store:
    """Samples behind one another in arrays, 5 bytes a token: lists of Python numbers would take ten times as much."""

    def __init__(self) -> None:
        self.ids = array("I")
        self.counts = bytearray()
        self.ends = [0]

    def add(self, sample: TokenSample, length: int) -> None:
        self.ids.extend(sample.tokens[:length])
        self.counts.extend(sample.counts[:length])
        self.ends.append(len(self.ids))

    def lengths(self) -> list[int]:
        return [end - start for start, end in zip(self.ends, self.ends[1:], strict=False)]


def make_rows(samples: Iterable[TokenSample], length: int, *, pack: bool) -> Rows:
    """Return rows of `length` tokens. Longer samples are cut at their end, and left out if no label is left.

    Raises UsageError if there is no sample, or none with a label that counts.
    """
    store, came, cut = _Store(), 0, 0
    for sample in samples:
        came += 1
        if any(sample.counts[1:length]):
            cut += len(sample.tokens) > length
            store.add(sample, length)
        if len(store.ids) > MAX_TOKENS:
            raise UsageError(f"the data has more than {MAX_TOKENS} tokens; give a part of it")
    if len(store.ends) == 1:
        why = "no sample has a label that counts within --sequence tokens" if came else "there is no sample in it"
        raise UsageError(f"the data is empty: {why}; give other data or a longer --sequence")
    places = _packed(store.lengths(), length) if pack else [[number] for number in range(len(store.ends) - 1)]
    left_out = came - (len(store.ends) - 1)
    return replace(_laid_out(store, places, length, pack=pack), cut=cut, left_out=left_out)


def _packed(lengths: list[int], room: int) -> list[list[int]]:
    """Return the numbers of the samples in each row: the longest first, each into the fullest row that has room for it.

    Best fit decreasing (Johnson, 1973) needs at most 11/9 of the fewest rows. Rows come in the order of their first samples.
    """
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # room left, and row
    for number in sorted(range(len(lengths)), key=lambda one: (-lengths[one], one)):
        place = bisect_left(free, (lengths[number], -1))
        left, row = free.pop(place) if place < len(free) else (room, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(number)
        if left > lengths[number]:
            insort(free, (left - lengths[number], row))
    return sorted(sorted(row) for row in rows)


def _laid_out(store: _Store, places: list[list[int]], length: int, *, pack: bool) -> Rows:
    shape = len(places), length
    ids_NT, labels_NT = np.full(shape, PADDING, np.uint32), np.full(shape, NO_LABEL, np.int32)
    positions_NT, held_N2 = np.zeros(shape, np.int32), np.zeros((len(places), 2), np.int64)
    ids_N, counts_N = np.frombuffer(store.ids, np.uint32), np.frombuffer(store.counts, np.uint8)
    for row, numbers in enumerate(places):
        begin = 0
        for number in numbers:
            first, last = store.ends[number], store.ends[number + 1]
            held = slice(begin, begin + last - first)
            counted = counts_N[first:last].astype(bool)
            counted[0] = False  # nothing before it predicts it
            ids_NT[row, held] = ids_N[first:last]
            labels_NT[row, held] = np.where(counted, ids_N[first:last].astype(np.int32), NO_LABEL)
            positions_NT[row, held] = np.arange(last - first)
            begin = held.stop
        held_N2[row] = len(numbers), begin
        positions_NT[row, begin:] = np.arange(length - begin)  # padding is a document of its own
    return Rows(ids_NT, labels_NT, positions_NT, held_N2, 0, 0, pack)


MAX_RATIO, FREE_BYTES = 100, 64 << 20
"""Bytes in memory for a byte on the disk; smaller arrays are read whatever their ratio. Zip packs zeros 1,000 times"""
MAX_TOLD = 16  # names of arrays in an error
_NUMBERS = "biufc"
_MAX_ID = 2**31 - 1


def load_arrays(path: Path, needed: Sequence[str] | None = None, optional: Sequence[str] = ()) -> dict[str, np.ndarray]:
    """Return the arrays `needed` of an .npz file by name and those `optional` ones that it has; all arrays if `needed` is None.

    Raises UsageError before anything is unpacked if the arrays would take more memory than is free, or than `MAX_RATIO` times the
    file. Also raises it if `path` is not a readable .npz file, lacks an array, or one is not of plain numbers.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            held = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            if missing := [name for name in needed or () if name not in held]:
                raise UsageError(
                    f"{path} has no array {missing[0]!r}: the model takes {', '.join(needed or ())}, "
                    f"the file has {', '.join(sorted(held)[:MAX_TOLD]) or 'none'}; write it with numpy.savez"
                )
            chosen = {name: info for name, info in held.items() if needed is None or name in (*needed, *optional)}
            unpacked = sum(_bytes_of(archive, info) for info in chosen.values())
            packed, free = path.stat().st_size, psutil.virtual_memory().available
            if unpacked > min(free, max(MAX_RATIO * packed, FREE_BYTES)):
                raise UsageError(
                    f"{path} has {packed:,} bytes and would take {unpacked:,} in memory, where {free:,} are free: "
                    + ("give a part of it" if unpacked > free else "write it with numpy.savez, which does not compress")
                )
            return {name: _array_of(archive, info) for name, info in chosen.items()}
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}; check its name and permissions") from None
    except UsageError:
        raise
    except Exception as error:  # zipfile, zlib and numpy's reader of headers raise ten kinds of errors
        raise UsageError(
            f"{path} is not a file of plain numpy arrays, or a damaged one: {error}; write it with numpy.savez"
        ) from None


def _bytes_of(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> int:
    """Return the bytes that an array takes, by its header alone. Dimensions of 0 count as 1, since rows without numbers take time.

    Raises ValueError if its elements are no numbers, or the archive states another size.
    """
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # zipfile unpacks others without a bound
        raise ValueError(f"{info.filename} is compressed by another method than numpy's")
    with archive.open(info) as file:
        readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
        version = npy.read_magic(file)
        if version not in readers:
            raise ValueError(f"{info.filename} is in version {version} of the format, which plain numbers do not need")
        shape, _, dtype = readers[version](file)
        if dtype.kind not in _NUMBERS or dtype.itemsize == 0 or min(shape, default=0) < 0:
            raise ValueError(f"{info.filename} holds {dtype} of shape {shape}, which are no numbers")
        if (stated := math.prod(shape) * dtype.itemsize + file.tell()) != info.file_size:
            raise ValueError(f"{info.filename} should have {stated} bytes, and has {info.file_size}")
    return math.prod(max(1, size) for size in shape) * dtype.itemsize


def _array_of(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
    with archive.open(info) as file:
        array: np.ndarray = npy.read_array(file, allow_pickle=False)
        file.read()  # to the end, where the checksum is compared
        return array


def read_arrays(path: Path, length: int) -> Iterator[TokenSample]:
    """Yield a sample for each row of `input_ids`, at most `length` tokens of it. Rows end with their last token that is not -100.

    Raises UsageError if the file has no `input_ids`, `labels` have another shape or are other tokens, or as `load_arrays` does.
    """
    arrays = load_arrays(path, ("input_ids",), ("labels",))
    ids_NT = arrays["input_ids"]
    labels_NT = arrays.get("labels", ids_NT)
    if (
        ids_NT.ndim != 2
        or labels_NT.shape != ids_NT.shape
        or not all(one.dtype.kind in "iu" for one in (ids_NT, labels_NT))
    ):
        raise UsageError(f"{path}: give whole numbers, one row a sample, and labels of the same shape as input_ids")
    for number, rows in enumerate(zip(ids_NT, labels_NT, strict=True)):
        ids_T, labels_T = (row.astype(np.int64) for row in rows)  # a row at a time: files may hold single bytes
        held = ids_T >= 0
        size = len(held) - int(held[::-1].argmax()) if held.any() else 0
        counts_T = labels_T[:size] != NO_LABEL
        is_token = held[:size] & (ids_T[:size] <= _MAX_ID)
        if not is_token.all() or (labels_T[:size] != ids_T[:size])[counts_T].any():
            raise UsageError(f"{path}, row {number}: ids or labels are no tokens; labels are the ids, or -100")
        yield TokenSample(ids_T[: min(size, length)].tolist(), counts_T[: min(size, length)].tolist())
