"""Records of training files: JSON lines (also compressed), Parquet, and folders of `datasets.Dataset.save_to_disk`.

Files are read record by record. Nothing is unpickled and no code of a data set runs.
"""

from __future__ import annotations

import bz2
import gzip
import importlib
import json
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from swarmnode.errors import UsageError

MAX_RECORD_BYTES = 16 << 20  # of one line: a compressed file of a few bytes can expand to any size
LINES, PARQUET, ARROW_STATE = ".jsonl", ".parquet", "state.json"
ROWS = 1024  # records of a Parquet file at a time
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_DAMAGE = (EOFError, lzma.LZMAError, gzip.BadGzipFile, ValueError)


class DataRecord(NamedTuple):
    """DataRecord of a data file: `place` names the file and the line or row, `fields` has its values by name."""

    place: str
    fields: dict[str, Any]


def holds_records(path: Path) -> bool:
    """Return whether a path is a file or a folder of records, by its name; plain text is not."""
    return _is_lines(path) or path.suffix == PARQUET or _is_saved(path)


def read_records(path: Path) -> Iterator[DataRecord]:
    """Yield the records of a JSON lines file, a Parquet file, or a folder that `datasets` has saved.

    Raises UsageError, naming the file and the line or row, if it cannot be read, is damaged, or a record is no object or longer
    than `MAX_RECORD_BYTES`.
    """
    if _is_saved(path):
        return _saved_records(path)
    return _parquet_records(path) if path.suffix == PARQUET else _line_records(path)


def _is_lines(path: Path) -> bool:
    stem = path.with_suffix("") if path.suffix in COMPRESSED else path
    return stem.suffix == LINES


def _is_saved(path: Path) -> bool:
    return (path / ARROW_STATE).is_file()


def _line_records(path: Path) -> Iterator[DataRecord]:
    number = 0
    try:
        with _open(path) as file:
            while line := file.readline(MAX_RECORD_BYTES + 1):
                number += 1
                if len(line) > MAX_RECORD_BYTES:
                    raise UsageError(
                        f"{path}, line {number}: longer than {MAX_RECORD_BYTES >> 20} MiB; split it into several records"
                    )
                if line.strip():
                    yield DataRecord(f"{path}, line {number}", _object(line, f"{path}, line {number}"))
    except _DAMAGE as error:
        raise UsageError(f"{path} is damaged after line {number}: {error}; write the file again") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}; check the file") from None


def _object(line: bytes, place: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        raise UsageError(f"{place}: not a JSON object in UTF-8; correct the line") from None
    if not isinstance(fields, dict):
        raise UsageError(f"{place}: not a JSON object; correct the line")
    return fields


def _open(path: Path) -> Any:
    """Open a file of lines, decompressed as its name says. Raises OSError, UsageError if a package for it is missing."""
    if path.suffix == ".zst":
        return _zstd(path)
    own: Any = {".gz": gzip, ".bz2": bz2, ".xz": lzma}.get(path.suffix)
    return path.open("rb") if own is None else own.open(path, "rb")


def _zstd(path: Path) -> IO[bytes]:
    try:
        zstandard: Any = importlib.import_module("zstandard")
    except ImportError:
        raise UsageError(
            f"{path}: Zstandard files need another package: pip install zstandard, or decompress it"
        ) from None
    file: IO[bytes] = zstandard.open(path, "rb")
    return file


def _arrow(path: Path, name: str) -> Any:
    """Return a module of pyarrow. Raises UsageError if it is not installed."""
    try:
        return importlib.import_module(f"pyarrow.{name}")
    except ImportError:
        raise UsageError(
            f"{path}: Parquet and folders of datasets need another package: pip install pyarrow, or give JSON lines"
        ) from None


def _parquet_records(path: Path) -> Iterator[DataRecord]:
    parquet = _arrow(path, "parquet")
    try:
        file = parquet.ParquetFile(path)
    except (ValueError, OSError) as error:
        raise UsageError(f"{path} is not a readable Parquet file: {error}; write it again") from None
    with file:
        yield from _rows(path, file.iter_batches(batch_size=ROWS))


def _saved_records(folder: Path) -> Iterator[DataRecord]:
    """Yield the rows of the Arrow files that the folder's `state.json` lists. Raises UsageError if one leaves the folder."""
    ipc = _arrow(folder, "ipc")
    try:
        names = [str(file["filename"]) for file in json.loads((folder / ARROW_STATE).read_bytes())["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"{folder} is not a readable folder of datasets: {error!r}; save the data set again") from None
    for name in names:
        if Path(name).name != name:
            raise UsageError(f"{folder}: its {ARROW_STATE} names a file outside of the folder; save the data set again")
        try:
            with ipc.open_stream(folder / name) as stream:
                yield from _rows(folder / name, stream)
        except (ValueError, OSError) as error:
            raise UsageError(
                f"{folder / name} is not a readable Arrow file: {error}; save the data set again"
            ) from None


def _rows(path: Path, batches: Any) -> Iterator[DataRecord]:
    first = 0
    for batch in batches:
        for row, fields in enumerate(batch.to_pylist(), first):
            given = {name: value for name, value in fields.items() if value is not None}
            yield DataRecord(f"{path}, row {row}", _without_nulls(given))
        first += batch.num_rows


def _without_nulls(value: Any) -> Any:
    """Return a value without fields that are null: a table fills the fields that other rows have with nulls."""
    if isinstance(value, dict):
        return {name: _without_nulls(one) for name, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value
