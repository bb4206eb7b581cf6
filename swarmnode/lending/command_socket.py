"""A socket in the home folder over which a process of the owner's takes commands, and which no other user may open.

One line of JSON in, one out:

    {"command": "pause", "reason": "a film", "keep": "memory", "wait_s": 60}
    {"name": "friends", "pid": 4711, "state": "paused", "reason": "a film", …}
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from swarmnode.codec.decoding import DECODE_ERRORS
from swarmnode.errors import LocalError
from swarmnode.lending.control_client import SUFFIX, is_listening

log = logging.getLogger(__name__)

MAX_LINE_BYTES = 4096
REQUEST_TIMEOUT_S = 5.0
MAX_PATH_BYTES = 104  # of a Unix socket, on the system that has the least


class ControlRequest(msgspec.Struct, frozen=True):
    """What the owner wants. `wait_s`: how long to wait until it is so, before the answer. `leave`: once what runs is finished.
    `about`: what is to be explained."""

    command: str
    reason: str = ""
    keep: str | None = None
    wait_s: float = 0.0
    leave: bool = False
    about: str = ""


class CommandSocket:
    """Takes commands for one process of the owner's; `obey` gives the answer to each, and raises KeyError or ValueError where it is
    none."""

    def __init__(self, obey: Callable[[ControlRequest], Awaitable[Mapping[str, Any]]]) -> None:
        self._obey = obey

    def __repr__(self) -> str:
        return f"<CommandSocket to {self._obey!r}>"

    @contextlib.asynccontextmanager
    async def listening(self, folder: Path, name: str) -> AsyncIterator[Path | None]:
        """Take commands while the context lasts, at the path that is given. None where the system has no place for a socket there.

        Raises LocalError where the folder cannot be written.
        """
        path = _free_path(folder, name)
        if sys.platform == "win32" or path is None:
            log.warning("%s is too long a path for a socket: no commands are taken", folder)
            yield None
            return
        server = await asyncio.start_unix_server(self._answer, path, limit=MAX_LINE_BYTES)
        path.chmod(0o600)
        try:
            yield path
        finally:
            server.close()
            path.unlink(missing_ok=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            line = await asyncio.wait_for(reader.readline(), REQUEST_TIMEOUT_S)
            writer.write(msgspec.json.encode(await self._answer_to(line)) + b"\n")
            await writer.drain()
        except (asyncio.TimeoutError, ValueError, ConnectionError) as error:  # ValueError: a line over its limit
            log.info("a command that cannot be answered: %r", error)
        finally:
            writer.close()

    async def _answer_to(self, line: bytes) -> Mapping[str, Any]:
        try:
            return await self._obey(msgspec.json.decode(line, type=ControlRequest))
        except (*DECODE_ERRORS, KeyError, ValueError) as error:
            return {"error": f"not a command: {error}"}


def _free_path(folder: Path, name: str) -> Path | None:
    """Where nobody answers: what a killed process left is taken away."""
    name = re.sub(r"[^\w.-]+", "-", name).strip("-.") or "node"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (
            folder.is_symlink()
        ):  # to where others may write, perhaps: whoever can replace a socket gets our owner's commands
            raise LocalError(f"{folder} is a link; it has to be a folder of its own")
        folder.chmod(0o700)
        for number in range(1, 100):
            path = folder / f"{name if number == 1 else f'{name}-{number}'}{SUFFIX}"
            if len(os.fsencode(path)) > MAX_PATH_BYTES:
                return None
            if not is_listening(path):
                path.unlink(missing_ok=True)
                return path
    except OSError as error:
        raise LocalError(f"cannot write {folder}: {error.strerror or error}") from error
    raise LocalError(f"a hundred of them run from {folder} already")
