"""Records are read from every kind of file, one by one, and a broken one is named by file and line."""

from __future__ import annotations

import bz2
import gzip
import importlib.util
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swarmnode.data import records
from swarmnode.data.arrays import read_arrays
from swarmnode.data.records import holds_records, read_records
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
