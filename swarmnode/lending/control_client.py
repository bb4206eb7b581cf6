"""Commands to the nodes and gateways of this machine, over the sockets in their home folder."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import msgspec

from swarmnode.codec.body import DECODE_ERRORS

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
