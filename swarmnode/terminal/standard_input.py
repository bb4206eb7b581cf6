"""Standard input: a prompt from a pipe, or a line such as an invite, which then does not show in the list of processes."""

from __future__ import annotations

import sys

from swarmnode.terminal.console import fail

STANDARD_INPUT = "-"  # the user's name for it
MAX_LINE_BYTES = 1 << 16


def is_piped() -> bool:
    """Return whether standard input is not a terminal."""
    return not sys.stdin.isatty()


def read_line() -> str:
    """Return the first line without surrounding white space; later lines stay unread. Ends the command if the line is empty."""
    line = _text(sys.stdin.buffer.readline(MAX_LINE_BYTES)).strip()
    return line or fail("standard input was empty: pipe a line into this command", 2)


def read_text(max_bytes: int) -> str:
    """Return all text of standard input, without the line break at its end. Ends the command if there are more than `max_bytes`."""
    data = sys.stdin.buffer.read(max_bytes + 1)
    if len(data) > max_bytes:
        fail(f"standard input has more than {max_bytes >> 20} MiB: send a shorter text", 2)
    return _text(data).rstrip("\r\n")


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        fail("standard input is not UTF-8 text: convert it first", 2)
