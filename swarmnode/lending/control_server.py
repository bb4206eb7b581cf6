"""What a running node does where its owner tells it to, over HOME/control/<name>.sock (`command_socket.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from swarmnode.lending.command_socket import CommandSocket, ControlRequest
from swarmnode.lending.control_client import NODES
from swarmnode.lending.lending import Keep, Lending

MAX_WAIT_S = 600.0
OWNER_ASKED = "you asked for it"


class ControlServer:
    """Answers for one node; `describe` is what every answer says beside the state, `stop` ends the node, and `why` explains it."""

    def __init__(
        self,
        lending: Lending,
        stop: asyncio.Event,
        describe: Callable[[], Mapping[str, Any]],
        why: Callable[[str], Mapping[str, Any]] = lambda _about: {},
    ) -> None:
        self._lending = lending
        self._stop = stop
        self._describe = describe
        self._why = why
        self._commands: dict[str, Callable[[ControlRequest], None]] = {
            "pause": self._pause,
            "resume": lambda _request: lending.resume(),
            "finish": lambda request: lending.finish(request.reason or OWNER_ASKED, leave=request.leave),
            "stop": lambda _request: stop.set(),
            "state": lambda _request: None,
            "why": lambda _request: None,
        }

    def __repr__(self) -> str:
        return f"<ControlServer of {self._lending!r}>"

    def listening(self, home: Path, name: str) -> AbstractAsyncContextManager[Path | None]:
        """Take commands while the context lasts; see CommandSocket."""
        return CommandSocket(self._obey).listening(home / NODES, name)

    async def _obey(self, request: ControlRequest) -> Mapping[str, Any]:
        self._commands[request.command](request)
        if request.wait_s > 0 and not self._stop.is_set():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._lending.settled(), min(request.wait_s, MAX_WAIT_S))
        explained = self._why(request.about) if request.command == "why" else {}
        return {**self._state(), **explained}

    def _pause(self, request: ControlRequest) -> None:
        self._lending.pause(request.reason or OWNER_ASKED, keep=Keep(request.keep) if request.keep else None)

    def _state(self) -> Mapping[str, Any]:
        lending = self._lending
        return {**self._describe(), "pid": os.getpid(), "state": lending.state.value, "reason": lending.reason}
