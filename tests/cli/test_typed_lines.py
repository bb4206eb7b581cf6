"""Lines from a pipe while a loop runs."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from swarmnode.cli.use.chat import MAX_LINE_BYTES, TypedLines


async def read_all(descriptor: int) -> list[str]:
    lines, typed = [], TypedLines(descriptor)
    while (line := await typed.next()) is not None:
        lines.append(line)
    return lines


def lines_of(data: bytes) -> list[str]:
    ours, theirs = os.pipe()
    os.write(theirs, data)
    os.close(theirs)
    try:
        return asyncio.run(read_all(ours))
    finally:
        os.close(ours)


def test_lines_come_one_by_one_and_the_last_needs_no_end() -> None:
    assert lines_of(b"one\r\n\ntwo\xff\nthree") == ["one", "", "two\ufffd", "three"]
    assert lines_of(b"") == []


def test_a_line_without_end_comes_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / "long"
    path.write_bytes(b"x" * (2 * MAX_LINE_BYTES))
    descriptor = os.open(path, os.O_RDONLY)
    try:
        lines = asyncio.run(read_all(descriptor))
    finally:
        os.close(descriptor)
    assert "".join(lines) == "x" * (2 * MAX_LINE_BYTES)
    assert max(map(len, lines)) <= MAX_LINE_BYTES
