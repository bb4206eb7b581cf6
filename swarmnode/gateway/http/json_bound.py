"""What reading a JSON body costs, known before it is read: parsing and checking hold the interpreter, also from a thread, so what
would take long is refused while it arrives. And the lists of requests, whose check ends at the first thing that is wrong."""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import Field

from swarmnode.gateway.http.api_error import ApiError

T = TypeVar("T")
MAX_VALUES = 150_000  # of a body: numbers, texts, names of fields, and what holds them
MAX_CONTAINERS = 15_000  # objects and lists among them, of which each is checked by some fields
STRUCTURE = b",:[{"  # one of these is before each value but the first

Items = Annotated[list[T], Field(fail_fast=True)]
"""A list in a request: without this, each wrong element is told of, which takes seconds for a megabyte of them"""

WholeNumber = Annotated[int, Field(strict=True)]
"""One of many: no text is read as a number"""


class JsonBound:
    """Counts what is in a body as it arrives, without its texts."""

    def __init__(self) -> None:
        self.values = 0
        self.containers = 0
        self._in_text = False
        self._held = b""  # a backslash, whose character has not come

    def __repr__(self) -> str:
        return f"<JsonBound: {self.values} values, {self.containers} of them objects and lists>"

    def push(self, piece: bytes) -> None:
        """Count the next piece. Raises ApiError where there is too much by now."""
        piece = self._held + piece
        self._held = b"\\" * ((len(piece) - len(piece.rstrip(b"\\"))) % 2)
        whole = piece[: len(piece) - len(self._held)].replace(rb"\\", b"").replace(rb"\"", b"")
        parts = whole.split(b'"')
        outside = b"".join(parts[self._in_text :: 2])
        self._in_text ^= len(parts) % 2 == 0
        self.values += len(outside) - len(outside.translate(None, STRUCTURE))
        self.containers += outside.count(b"[") + outside.count(b"{")
        if self.values > MAX_VALUES:
            raise ApiError(413, f"a request may have {MAX_VALUES:,} values in its JSON")
        if self.containers > MAX_CONTAINERS:
            raise ApiError(413, f"a request may have {MAX_CONTAINERS:,} objects and lists in its JSON")
