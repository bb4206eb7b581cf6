"""Lines that somebody types, or that come through a pipe, while a loop runs."""

from __future__ import annotations

import asyncio
import os
import threading

STANDARD_INPUT = 0
PIECE_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 20  # a longer one is taken in pieces


class TypedLines:
    """`next` reads one line at a time, so that what nobody has asked for stays in the pipe.

    The thread that waits is a daemon and reads the descriptor itself: one within `input()` would keep the interpreter from ending.
    """

    def __init__(self, descriptor: int = STANDARD_INPUT) -> None:
        self._descriptor = descriptor
        self._read = bytearray()

    def __repr__(self) -> str:
        return f"<TypedLines of descriptor {self._descriptor}>"

    async def next(self) -> str | None:
        """The next line without its end; None where there is none any more."""
        loop = asyncio.get_running_loop()
        line: asyncio.Future[str | None] = loop.create_future()

        def resolve(text: str | None) -> None:
            if not line.done():
                line.set_result(text)

        def wait() -> None:
            text = self._line()
            if not loop.is_closed():
                loop.call_soon_threadsafe(resolve, text)

        threading.Thread(target=wait, name="swarmnode-typed", daemon=True).start()
        return await line

    def _line(self) -> str | None:
        while (end := self._read.find(b"\n")) < 0 and len(self._read) < MAX_LINE_BYTES:
            piece = self._piece()
            if not piece:
                break
            self._read += piece
        if not self._read:
            return None
        whole = end >= 0
        line = self._read[: end if whole else MAX_LINE_BYTES]
        del self._read[: len(line) + whole]
        return line.decode(errors="replace").rstrip("\r")

    def _piece(self) -> bytes:
        """What has come; nothing where nothing comes any more, as when the terminal is gone."""
        try:
            return os.read(self._descriptor, PIECE_BYTES)
        except OSError:
            return b""
