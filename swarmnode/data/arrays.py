"""Arrays in .npz files, read within a bound of memory. Nothing is unpickled.

Samples of token ids are `input_ids_NT`, and `labels_NT` if not every token counts.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil
from numpy.lib import format as npy

from swarmnode.data.rows import NO_LABEL
from swarmnode.data.samples import TokenSample
from swarmnode.errors import UsageError

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
