"""Records are read from every kind of file, one by one, and a broken one is named by file and line."""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import importlib.util
import io
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from swarmnode.data import records
from swarmnode.data import rows as arrays
from swarmnode.data.records import holds_records, read_records
from swarmnode.data.rows import read_arrays
from swarmnode.data.samples import sample_kind
from swarmnode.errors import UsageError

ROWS = [{"text": "one"}, {"text": "zwei ü", "n": 2}]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n\n" for row in ROWS).encode()
needs_arrow = pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="pyarrow is optional")


@pytest.mark.parametrize(
    ("name", "pack"),
    [("a.jsonl", bytes), ("a.jsonl.gz", gzip.compress), ("a.jsonl.bz2", bz2.compress), ("a.jsonl.xz", lzma.compress)],
)
def test_lines_are_read_however_they_are_compressed(tmp_path: Path, name: str, pack: Callable[[bytes], bytes]) -> None:
    path = tmp_path / name
    path.write_bytes(pack(LINES))
    assert holds_records(path)
    assert [record.fields for record in read_records(path)] == ROWS
    assert [record.place for record in read_records(path)] == [f"{path}, line 1", f"{path}, line 3"]
    path.write_bytes(pack(LINES)[:-9])
    with pytest.raises(UsageError, match=name):
        list(read_records(path))


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b"nonsense", "line 2: not a JSON object"),
        (b"[1]", "line 2: not a JSON object"),
        (b'{"text": "\xff"}', "line 2: not a JSON object in UTF-8"),
        (b"[" * 100_000, "line 2: not a JSON object"),
        (b'{"text": "' + b"x" * 200 + b'"}', "line 2: longer than"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: bytes, told: str) -> None:
    if b"xxx" in line:
        monkeypatch.setattr(records, "MAX_RECORD_BYTES", 100)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "x"}\n' + line + b"\n")
    with pytest.raises(UsageError, match=told):
        list(read_records(path))


def test_a_bomb_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MAX_RECORD_BYTES", 1 << 16)
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(bytes(1 << 24)))
    with pytest.raises(UsageError, match="line 1: longer"):
        list(read_records(path))


@needs_arrow
def test_tables_are_read_without_their_nulls(tmp_path: Path) -> None:
    arrow: Any = pytest.importorskip("pyarrow")
    parquet: Any = pytest.importorskip("pyarrow.parquet")
    told = [{"messages": [{"role": "user", "content": "hi", "name": None}]}, {"messages": [{"role": "a", "name": "b"}]}]
    path, folder = tmp_path / "a.parquet", tmp_path / "saved"
    table = arrow.Table.from_pylist(told)
    parquet.write_table(table, path)
    folder.mkdir()
    with arrow.ipc.new_stream(folder / "data.arrow", table.schema) as stream:
        stream.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    expected = [{"messages": [{"role": "user", "content": "hi"}]}, {"messages": [{"role": "a", "name": "b"}]}]
    for source in (path, folder):
        assert holds_records(source)
        assert [record.fields for record in read_records(source)] == expected
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "../a.parquet"}]}))
    with pytest.raises(UsageError, match="outside of the folder"):
        list(read_records(folder))
    path.write_bytes(b"PAR1")
    with pytest.raises(UsageError, match="not a readable Parquet"):
        list(read_records(path))


def test_arrays_give_a_sample_a_row(tmp_path: Path) -> None:
    path = tmp_path / "ids.npz"
    ids = np.array([[1, 2, 3, -100], [4, 5, 6, 7]])
    np.savez(path, input_ids=ids, labels=np.where(ids > 2, ids, -100))
    assert [tuple(sample) for sample in read_arrays(path, 3)] == [
        ([1, 2, 3], [False, False, True]),
        ([4, 5, 6], [True, True, True]),
    ]
    for bad, told in (
        ({"ids": ids}, "input_ids"),
        ({"input_ids": ids.astype(float)}, "whole numbers"),
        ({"input_ids": ids, "labels": ids + 1}, "row 0"),
        ({"input_ids": np.array([[print, 1]], dtype=object)}, "plain numpy"),
    ):
        np.savez(path, **bad)
        with pytest.raises(UsageError, match=told):
            list(read_arrays(path, 3))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32", "int64", "uint64", ">i4"])
@pytest.mark.parametrize("write", [np.savez, np.savez_compressed])
def test_arrays_of_all_whole_numbers_are_read(tmp_path: Path, dtype: str, write: Any) -> None:
    ids = np.asfortranarray(np.arange(12).reshape(3, 4).astype(dtype))
    write(tmp_path / "ids.npz", input_ids=ids, others=np.zeros(1000, dtype="S8"))
    assert [sample.tokens for sample in read_arrays(tmp_path / "ids.npz", 4)] == ids.tolist()


def test_arrays_larger_than_the_free_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "ids.npz", input_ids=np.zeros((100, 10), dtype=int))
    monkeypatch.setattr(arrays.psutil, "virtual_memory", lambda: SimpleNamespace(available=7999))
    with pytest.raises(UsageError, match="would take 8,000 in memory, where 7,999 are free: give a part"):
        list(read_arrays(tmp_path / "ids.npz", 4))


TALKS = [
    {"messages": [{"role": "user", "content": f'hi, {n} "ü"\n'}, {"role": "assistant", "content": "[{yes}]"}]}
    for n in "12"
]
PAIRS = [{"prompt": "a, b", "completion": 'c "d"'}, {"prompt": "e\nf", "completion": "g;"}]


def table(rows: list[dict[str, str]], delimiter: str) -> str:
    held = io.StringIO()
    writer = csv.DictWriter(held, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return held.getvalue()


FORMS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "lines": ("".join(json.dumps(row) + "\r\n" for row in TALKS), TALKS),
    "list": (json.dumps(TALKS), TALKS),
    "list over lines": (json.dumps(TALKS, indent=2, ensure_ascii=False), TALKS),
    "objects over lines": ("\n".join(json.dumps(row, indent=1) for row in TALKS), TALKS),
    "commas": (table(PAIRS, ","), PAIRS),
    "tabs": (table(PAIRS, "\t"), PAIRS),
    "semicolons": (table(PAIRS, ";"), PAIRS),
}


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.ndjson", "a.txt", "a", "a.csv", "a.tsv", "a.gz", "a.txt.xz"])
@pytest.mark.parametrize("form", FORMS)
def test_a_file_is_what_it_contains(tmp_path: Path, form: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "PIECE_BYTES", 7)
    text, rows = FORMS[form]
    if (rows is PAIRS and "json" in name) or (form.startswith("objects") and not name.startswith("a.json")):
        return
    for mark, pack in ((b"", bytes), (codecs.BOM_UTF8, bytes), (b"", gzip.compress), (b"", lzma.compress)):
        path = tmp_path / name
        path.write_bytes(pack(mark + text.encode()))
        if form == "objects over lines" and name != "a.json":
            continue
        assert holds_records(path)
        assert [record.fields for record in read_records(path)] == rows
        assert sample_kind(path) == rows[0].keys()


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e"])
def test_only_line_breaks_end_a_row(tmp_path: Path, separator: str) -> None:
    path = tmp_path / "a.csv"
    for head, row, field in (
        ("text", f"a{separator}b", "text"),
        (",prompt,completion,", f"0,x,a{separator}b,", "completion"),
    ):
        path.write_bytes(f"\r\n\n{head}\r\n{row}\r\n{row}\r\n".encode())
        told = list(read_records(path))
        assert [record.fields[field] for record in told] == [f"a{separator}b"] * 2
        assert [record.place for record in told] == [f"{path}, line 4", f"{path}, line 5"]


def test_a_table_of_one_endless_line_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MAX_RECORD_BYTES", 1 << 16)
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(b"text\n" + bytes(1 << 24)))
    with pytest.raises(UsageError, match="a line is longer"):
        list(read_records(path))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Once upon a time, there was",
        "text\nmore",
        "[1] a note",
        "{ braces }",
        "{% if x %}",
        "[{'a': 1}]",
        "a,b\n1,2",
    ],
)
def test_text_stays_text(tmp_path: Path, text: str) -> None:
    for name in ("a.txt", "a.md", "a"):
        (tmp_path / name).write_text(text)
        assert not holds_records(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.csv", "question,answer\n1,2\n", "its columns are 'answer', 'question'; name them"),
        ("a.csv", "prompt,completion\na,b\nc\n", "line 3: 1 cells for 2 columns"),
        ("a.csv", "prompt,prompt,completion\na,b,c\n", "name them once"),
        ("a.json", '[{"text": "a"}, 3]', "line 1: not a JSON object"),
        ("a.json", '[{"text": "a"},\n{"text": "b"', "line 2: not a whole JSON object"),
        ("a.json", '{"data": [{"text": "a"}]}', "save that list alone"),
        ("a.json", '{"version": 1, "data": [{"text": "a"}]}', "'data' holds the records; save that list alone"),
        ("a.json", json.dumps({"dialog": TALKS[0]["messages"]}), "'dialog' holds messages; name it .messages."),
        ("a.tsv", 'prompt\tcompletion\na\t"b" c\n', "quote a cell that has a quotation mark"),
        ("a.csv", "\n \n", "is empty"),
        ("a.jsonl", "\ufffe", "line 1: not a JSON object"),
    ],
)
def test_what_cannot_be_read_is_named_with_the_fix(tmp_path: Path, name: str, text: str, told: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=told):
        sample_kind(tmp_path / name)
        list(read_records(tmp_path / name))


def test_a_folder_of_several_data_sets_is_refused(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text("{}")
    with pytest.raises(UsageError, match="folder of one of them"):
        sample_kind(tmp_path)
