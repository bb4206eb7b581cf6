"""What comes through standard input: a prompt out of a pipe, or a line that keeps an invite out of the list of processes."""

from __future__ import annotations

import sys

from swarmnode.cli.terminal.console import fail

STANDARD_INPUT = "-"  # what a user types for it
MAX_LINE_BYTES = 1 << 16


def is_piped() -> bool:
    """Whether something other than a person is at the other end."""
    return not sys.stdin.isatty()


def read_line() -> str:
    """The first line, without what surrounds it; what follows is left for others."""
    line = _text(sys.stdin.buffer.readline(MAX_LINE_BYTES)).strip()
    return line or fail("nothing came from standard input", 2)


def read_text(max_bytes: int) -> str:
    """All that comes, without the end of its last line."""
    data = sys.stdin.buffer.read(max_bytes + 1)
    if len(data) > max_bytes:
        fail(f"more than {max_bytes >> 20} MiB came from standard input", 2)
    return _text(data).rstrip("\r\n")


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        fail("what came from standard input is not text in UTF-8", 2)
