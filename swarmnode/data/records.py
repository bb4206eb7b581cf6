"""Records of training files: JSON lines and lists, tables with commas or tabs, Parquet, and folders of
`datasets.Dataset.save_to_disk`.

A file is what it contains, whatever its name is. Files are read record by record. Nothing is unpickled and no code of a
data set runs.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import importlib
import io
import json
import lzma
import re
from collections.abc import Iterator
from enum import Enum, auto
from pathlib import Path
from typing import IO, Any, NamedTuple

from swarmnode.data.formats import KINDS
from swarmnode.errors import UsageError
from swarmnode.files import parse_json
from swarmnode.version import missing_package

MAX_RECORD_BYTES = 16 << 20  # of one line: a compressed file of a few bytes can expand to any size
JSON_SUFFIXES, TABLE_SUFFIXES = (".jsonl", ".ndjson", ".json"), (".csv", ".tsv")
PARQUET, ARROW_STATE, SPLITS = ".parquet", "state.json", "dataset_dict.json"
HEAD_BYTES, PIECE_BYTES = 1 << 16, 1 << 20  # read to tell what a file holds; read of a list at a time
MAGIC = {b"\x1f\x8b": ".gz", b"BZh": ".bz2", b"\xfd7zXZ\x00": ".xz", b"\x28\xb5\x2f\xfd": ".zst"}
ROWS = 1024  # records of a Parquet file at a time
_DAMAGE = (EOFError, lzma.LZMAError, gzip.BadGzipFile, ValueError)


class DataRecord(NamedTuple):
    """DataRecord of a data file: `place` names the file and the line or row, `fields` has its values by name."""

    place: str
    fields: dict[str, Any]


class RecordForm(Enum):
    """RecordForm of a file of records: JSON lines, other JSON (a list, or objects over several lines), a table, or Parquet."""

    LINES = auto()
    JSON = auto()
    TABLE = auto()
    PARQUET = auto()


def holds_records(path: Path) -> bool:
    """Return whether a path is a file or a folder of records, by its content; plain text and unreadable files are not, unless they
    are named as records. Raises UsageError for a folder of several data sets."""
    if (path / SPLITS).is_file():
        raise UsageError(f"{path} holds several data sets; give the folder of one of them")
    return _is_saved(path) or (path.is_file() and _form(path) is not None)


def read_records(path: Path) -> Iterator[DataRecord]:
    """Yield the records of a file of any `RecordForm`, or of a folder that `datasets` has saved.

    Raises UsageError, naming the file and the line or row, if it cannot be read, is damaged, or a record is no object or longer
    than `MAX_RECORD_BYTES`.
    """
    if _is_saved(path):
        return _saved_records(path)
    readers = {RecordForm.PARQUET: _parquet_records, RecordForm.JSON: _json_records, RecordForm.TABLE: _table_records}
    return readers.get(_form(path) or RecordForm.LINES, _line_records)(path)


def _form(path: Path) -> RecordForm | None:
    """Return the form of a file's records; None for another file. The name decides where the content says nothing."""
    plain = path.with_suffix("") if path.suffix in MAGIC.values() else path
    named = {
        PARQUET: RecordForm.PARQUET,
        **dict.fromkeys(JSON_SUFFIXES, RecordForm.LINES),
        **dict.fromkeys(TABLE_SUFFIXES, RecordForm.TABLE),
    }
    by_name = named.get(plain.suffix.lower())
    try:
        with _open(path) as file:
            head = file.read(HEAD_BYTES)
    except (*_DAMAGE, OSError):
        return by_name
    if head.startswith(b"PAR1") or by_name is RecordForm.PARQUET:
        return RecordForm.PARQUET
    text = head.removeprefix(codecs.BOM_UTF8).lstrip()
    line, _, _ = text.partition(b"\n")
    if re.match(rb"\[\s*\{", text):
        return RecordForm.JSON if by_name or re.match(rb'\[\s*\{\s*"', text) else None
    if text.startswith(b"{"):
        if _is_object(line) or len(line) == HEAD_BYTES:
            return RecordForm.LINES
        if re.match(rb'\{\s*"[^"\n]*"\s*:', text) and (line.strip() == b"{" or plain.suffix.lower() == ".json"):
            return RecordForm.JSON
    if by_name is not None or b"\0" in head:
        return by_name
    columns = set(_columns(line.decode(errors="replace"))[0])
    return RecordForm.TABLE if any(len(kind) > 1 and kind <= columns for kind in KINDS) else None


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(parse_json(line), dict)
    except ValueError:
        return False


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
        fields = parse_json(line)
    except ValueError:
        raise UsageError(f"{place}: not a JSON object in UTF-8; correct the line") from None
    if not isinstance(fields, dict):
        raise UsageError(f"{place}: not a JSON object; write each record as an object on a line of its own")
    return fields


def _json_records(path: Path) -> Iterator[DataRecord]:
    """Yield the objects of a JSON list, or those that stand behind one another, each over any number of lines."""
    decode, read = codecs.getincrementaldecoder("utf-8-sig")(), json.JSONDecoder()
    rest, line, is_over = "", 1, False
    try:
        with _open(path) as file:
            while True:
                between = re.match(r"[\s,\[\]]*", rest)
                assert between is not None
                line, rest = line + between[0].count("\n"), rest[between.end() :]
                place = f"{path}, line {line}"
                if rest and not rest.startswith("{"):
                    raise UsageError(f"{place}: not a JSON object; correct the line")
                try:
                    fields, end = read.raw_decode(rest) if rest else ({}, 0)
                except (ValueError, RecursionError):
                    end = 0
                if end:
                    yield DataRecord(place, fields)
                    line, rest = line + rest.count("\n", 0, end), rest[end:]
                elif is_over:
                    break
                elif len(rest) > MAX_RECORD_BYTES:
                    raise UsageError(
                        f"{place}: longer than {MAX_RECORD_BYTES >> 20} MiB; split it into several records, or save the list "
                        "in it alone"
                    )
                else:
                    piece = file.read(max(PIECE_BYTES, len(rest)))
                    rest, is_over = rest + decode.decode(piece, final=not piece), not piece
    except _DAMAGE as error:
        raise UsageError(f"{path} is damaged after line {line}: {error}; write the file again") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}; check the file") from None
    if rest:
        raise UsageError(f"{path}, line {line}: not a whole JSON object; correct it")


def _columns(line: str) -> tuple[list[str], str]:
    """Return the names in a table's first line, and its delimiter: the one that gives a known kind, or else most columns."""
    found = [(next(csv.reader([line.strip()], delimiter=mark), []), mark) for mark in ",\t;"]
    return max(found, key=lambda one: (any(kind <= set(one[0]) for kind in KINDS), len(one[0])))


def _table_records(path: Path) -> Iterator[DataRecord]:
    """Yield the rows of a table whose first line names the columns. An empty cell counts as missing, unless its column makes the
    record a sample."""
    csv.field_size_limit(MAX_RECORD_BYTES)
    number = 0
    try:
        with _open(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
            lines = _bounded(text, path)
            number, first = next(((place, line) for place, line in enumerate(lines, 1) if line.strip()), (0, ""))
            if not first:
                return
            names, mark = _columns(first)
            sample_kind = next((kind for kind in KINDS if kind <= set(names)), None)
            named = [name for name in names if name]
            if sample_kind is None or len(set(named)) < len(named):
                told = ", ".join(sorted(map(repr, named)))
                raise UsageError(
                    f'{path}: its columns are {told}; name them once, as in "prompt" and "completion", or "text"'
                )
            names, header = [name or f"column {place}" for place, name in enumerate(names, 1)], number
            for cells in (table := csv.reader(lines, delimiter=mark, strict=True)):
                place, number = f"{path}, line {number + 1}", header + table.line_num
                if len(cells) != len(names) and cells:
                    raise UsageError(
                        f"{place}: {len(cells)} cells for {len(names)} columns; quote cells with {mark!r} in them"
                    )
                if cells:
                    row = zip(names, cells, strict=True)
                    yield DataRecord(place, {name: cell for name, cell in row if cell or name in sample_kind})
    except csv.Error as error:
        raise UsageError(
            f"{path} is damaged after line {number}: {error}; quote a cell that has a quotation mark, and double the mark"
        ) from None
    except _DAMAGE as error:
        raise UsageError(f"{path} is damaged after line {number}: {error}; write the file again as UTF-8") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}; check the file") from None


def _bounded(text: IO[str], path: Path) -> Iterator[str]:
    """Yield the lines of a text with their ends. Only line breaks end them: a cell may hold other separators of Unicode. Raises
    UsageError for a line longer than MAX_RECORD_BYTES."""
    while line := text.readline(MAX_RECORD_BYTES + 1):
        if len(line) > MAX_RECORD_BYTES:
            raise UsageError(
                f"{path}: a line is longer than {MAX_RECORD_BYTES >> 20} MiB; split it into several records"
            )
        yield line


def _open(path: Path) -> Any:
    """Open a file of bytes, decompressed as its first bytes say. Raises OSError, UsageError if a package for it is missing."""
    with path.open("rb") as file:
        head = file.read(8)
    suffix = next((suffix for magic, suffix in MAGIC.items() if head.startswith(magic)), "")
    if suffix == ".zst":
        return _zstd(path)
    own: Any = {".gz": gzip, ".bz2": bz2, ".xz": lzma}.get(suffix)
    return path.open("rb") if own is None else own.open(path, "rb")


def _zstd(path: Path) -> IO[bytes]:
    try:
        zstandard: Any = importlib.import_module("zstandard")
    except ImportError:
        raise UsageError(f"{path}: {missing_package('zstandard')}; or decompress the file") from None
    file: IO[bytes] = zstandard.open(path, "rb")
    return file


def _arrow(path: Path, name: str) -> Any:
    """Return a module of pyarrow. Raises UsageError if it is not installed."""
    try:
        return importlib.import_module(f"pyarrow.{name}")
    except ImportError:
        raise UsageError(f"{path}: {missing_package('pyarrow')}; or give JSON lines") from None


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
        names = [str(file["filename"]) for file in parse_json((folder / ARROW_STATE).read_bytes())["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
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
