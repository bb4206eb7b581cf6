"""Command sockets of nodes and gateways (HOME/control/<name>.sock), and a node's answers to its owner's commands.

Commands to the nodes and gateways of this machine, over the sockets in their home folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol

import msgspec

from swarmnode.codec.body import DECODE_ERRORS
from swarmnode.errors import LocalError, UsageError
from swarmnode.lending.lending import Keep, Lending

NODES = "control"
GATEWAYS = "gateways"
SUFFIX = ".sock"
ANSWER_TIMEOUT_S = 5.0
MAX_ANSWER_BYTES = 1 << 20


def running_nodes(home: Path) -> dict[str, Path]:
    """Return the sockets of this home's nodes by name, also those of nodes that no longer run."""
    return _sockets(home / NODES)


def running_gateways(home: Path) -> dict[str, Path]:
    """Return the sockets of this home's gateways (`swarmnode serve` or `run --serve`) by swarm name, also of those that
    no longer run."""
    return _sockets(home / GATEWAYS)


def _sockets(folder: Path) -> dict[str, Path]:
    return {path.name.removesuffix(SUFFIX): path for path in sorted(folder.glob(f"*{SUFFIX}"))}


def is_listening(path: Path) -> bool:
    """Return whether a process listens at this socket, though it may be stopped or too busy to answer; False on Windows."""
    if sys.platform == "win32":
        return False
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(ANSWER_TIMEOUT_S)
            connection.connect(str(path))
    except (FileNotFoundError, ConnectionError):  # left by a killed process
        return False
    except OSError:
        return True
    return True


def tell_node(path: Path, command: str, *, wait_s: float = 0.0, **more: Any) -> dict[str, Any] | None:
    """Send a command to the node at this socket, and return its answer; None if there is no node or it does not answer
    in time."""
    if sys.platform == "win32":  # nodes have no sockets there
        return None
    line = msgspec.json.encode({"command": command, "wait_s": wait_s, **more}) + b"\n"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(ANSWER_TIMEOUT_S + wait_s)
            connection.connect(str(path))
            connection.sendall(line)
            with connection.makefile("rb") as answers:
                answer = msgspec.json.decode(answers.readline(MAX_ANSWER_BYTES))
    except (OSError, *DECODE_ERRORS):
        return None
    return answer if isinstance(answer, dict) else None


log = logging.getLogger(__name__)

MAX_WAIT_S = 600.0  # for the command to take effect
OWNER_ASKED = "you asked for it"
MAX_LINE_BYTES = 1 << 14
REQUEST_TIMEOUT_S = 5.0
MAX_PATH_BYTES = 104  # of a Unix socket, on the system with the lowest limit


class ControlRequest(msgspec.Struct, frozen=True):
    """Command of the owner, with its arguments.

    Attributes:
        command: Name of the command.
        reason: The owner's reason, for the log and the display.
        keep: Where weights stay during a pause, as a value of `Keep`.
        wait_s: Seconds to wait at most until the command has taken effect, before the answer.
        leave: Whether the node leaves the swarm after finishing.
        about: Subject to explain.
        change: Values of the node's options by name, as typed; empty ones turn the option off.
    """

    command: str
    reason: str = ""
    keep: str | None = None
    wait_s: float = 0.0
    leave: bool = False
    about: str = ""
    change: dict[str, str | bool | list[str]] = {}  # msgspec gives each instance its own


class CommandSocket:
    """Socket for commands to one process of the owner. `execute` answers a command; it raises KeyError or ValueError if it
    is invalid."""

    def __init__(self, execute: Callable[[ControlRequest], Awaitable[Mapping[str, Any]]]) -> None:
        self._execute = execute

    @contextlib.asynccontextmanager
    async def listening(self, folder: Path, name: str) -> AsyncIterator[Path | None]:
        """Take commands at a socket in `folder` while the context lasts, and yield its path; None if there can be no
        socket.

        Raises LocalError if the folder cannot be written or used.
        """
        path = _free_path(folder, name)
        if sys.platform == "win32" or path is None:
            log.warning(
                "no command socket in %s (path too long, or no support here): commands do not reach this process",
                folder,
            )
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
            try:
                answer = await self._execute(msgspec.json.decode(line, type=ControlRequest))
            except (*DECODE_ERRORS, KeyError, ValueError) as error:
                answer = {"error": f"not a command: {error}"}
            writer.write(msgspec.json.encode(answer) + b"\n")
            await writer.drain()
        except (asyncio.TimeoutError, ValueError, ConnectionError) as error:  # ValueError: a line over its limit
            log.info("cannot answer a command: %r", error)
        except (
            asyncio.CancelledError
        ):  # the process ends; asyncio's own callback of a stream cannot take a cancelled task
            log.info("this process ends before a command has taken effect")
        finally:
            writer.close()


def _free_path(folder: Path, name: str) -> Path | None:
    """Return the path of a free socket, after removing a socket of a killed process; None if the path would be too
    long.

    Raises LocalError if the folder is a link, cannot be written, or has too many sockets in use.
    """
    name = re.sub(r"[^\w.-]+", "-", name).strip("-.") or "node"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if folder.is_symlink():  # perhaps to a folder of another user, who could replace sockets and take our commands
            raise LocalError(f"{folder} is a link; replace it with a folder")
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
    raise LocalError(f"too many processes use {folder} already; stop one or choose another --home")


def process_of(swarm: bytes, *sockets: Path) -> dict[str, Any] | None:
    """Return the state of the first process at these sockets that takes part in a swarm; None if none does, or none answers."""
    states = (tell_node(path, "state") for path in sockets)
    return next((state for state in states if state is not None and state.get("swarm_id") == swarm.hex()), None)


class OwnersOptions(Protocol):
    """Options of a running node that its owner may change."""

    def listed(self) -> list[dict[str, Any]]:
        """Return the options and their values."""

    def change(self, texts: Mapping[str, Any]) -> str:
        """Change options, and return sentences about the effect. Raises UsageError or LocalError if that cannot be done; then
        nothing changes."""

    def reload(self) -> str:
        """Read all options again, and return a sentence about the effect. Raises LocalError."""


class ControlServer:
    """Commands for one node.

    Args:
        lending: State machine that the commands act on.
        stop: Set to end the node.
        describe: Returns the facts that every answer has beside the state.
        why: Explains a subject.
        options: Options that the owner may change; None if there are none.
    """

    def __init__(
        self,
        lending: Lending,
        stop: asyncio.Event,
        describe: Callable[[], Mapping[str, Any]],
        why: Callable[[str], Mapping[str, Any]] = lambda _about: {},
        options: OwnersOptions | None = None,
    ) -> None:
        self._lending = lending
        self._stop = stop
        self._describe = describe
        self._options = options
        self._commands: dict[str, Callable[[ControlRequest], Mapping[str, Any] | None]] = {
            "pause": self._pause,
            "resume": lambda _request: lending.resume(),
            "finish": lambda request: lending.finish(request.reason or OWNER_ASKED, leave=request.leave),
            "stop": self._leave,
            "state": lambda _request: None,
            "why": lambda request: why(request.about),
            "reload": lambda _request: self._with_options(lambda options: {"told": options.reload()}),
            "options": lambda _request: self._with_options(lambda options: {"options": options.listed()}),
            "change": lambda request: self._with_options(
                lambda options: {"told": options.change(request.change), "options": options.listed()}
            ),
        }

    def listening(self, home: Path, name: str) -> AbstractAsyncContextManager[Path | None]:
        """Take commands while the context lasts, as `CommandSocket.listening` does. Raises LocalError if the folder
        cannot be used."""
        return CommandSocket(self._execute).listening(home / NODES, name)

    async def _execute(self, request: ControlRequest) -> Mapping[str, Any]:
        told = self._commands[request.command](request)
        if request.wait_s > 0 and not self._stop.is_set():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._lending.settled(), min(request.wait_s, MAX_WAIT_S))
        state = {"pid": os.getpid(), "state": self._lending.state.value, "reason": self._lending.reason}
        return {**self._describe(), **state, **(told or {})}

    def _leave(self, _request: ControlRequest) -> Mapping[str, Any]:
        self._stop.set()
        return {"told": "leaving"}

    def _with_options(self, work: Callable[[OwnersOptions], Mapping[str, Any]]) -> Mapping[str, Any]:
        if self._options is None:
            return {"error": "this node was started without options that can change"}
        try:
            return work(self._options)
        except (UsageError, LocalError) as error:
            return {"error": str(error)}

    def _pause(self, request: ControlRequest) -> None:
        self._lending.pause(request.reason or OWNER_ASKED, keep=Keep(request.keep) if request.keep else None)
