"""`swarmnode pause`, `resume`, `finish`, `reload` and `stop`: what the owner wants of the nodes that run on this machine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnode.cli.options.metrics import Watch
from swarmnode.cli.options.option import argument, option
from swarmnode.cli.terminal.console import HOME, JSON, command, fail, print_json, say
from swarmnode.metrics.metric import Source

if TYPE_CHECKING:
    from swarmnode.node.node import Node

NO_ANSWER = {"swarm": "", "pid": "", "state": "no answer", "reason": "stopped, or busy", "sessions": ""}
NAME = argument("", "The node, as `swarmnode ps` calls it; default: all.", metavar="[NAME]")
WAIT = option(60.0, "How long to wait until it is so; 0: not at all.", "--wait", metavar="SECONDS", min=0.0, max=600.0)
SILENT = "it gives no answer: it is stopped (SIGSTOP), or hangs"
KEEP = ("disk", "memory")
REASON = option("", "Shown by `swarmnode ps`.", "--reason")


@contextlib.asynccontextmanager
async def attended(
    node: Node,
    stop: asyncio.Event,
    watch: Watch,
    *,
    swarm: str,
    readings: Source,
    name: str = "",
    reload: Callable[[], str] | None = None,
) -> AsyncIterator[None]:
    """Its socket in the home folder and its metrics are there while the context lasts. `name` is what `ps` calls it; default: the
    swarm's. `reload` reads its options again; None if it has none. Raises LocalError where one of them cannot be."""
    from swarmnode.lending.control_server import ControlServer

    control = ControlServer(node.lending, stop, node.describe, node.why, reload)
    async with watch.over(swarm, readings), control.listening(watch.home, name or swarm):
        yield


@command
def pause(
    name: str = NAME,
    keep: str = option("disk", "Where the weights stay: memory goes on sooner, disk frees all.", metavar="disk|memory"),
    reason: str = REASON,
    wait: float = WAIT,
    home: Path = HOME,
    as_json: bool = JSON,
) -> None:
    """Free this machine: sessions move to other peers, the device is given back. `swarmnode resume` goes on.

    Example: swarmnode pause --keep memory
    """
    if keep not in KEEP:
        fail(f"--keep {keep}: choose {' or '.join(KEEP)}", 2)
    _tell_nodes("pause", name, home, as_json, wait_s=wait, keep=keep, reason=reason)


@command
def resume(name: str = NAME, wait: float = WAIT, home: Path = HOME, as_json: bool = JSON) -> None:
    """Lend again after `pause` or `finish`. Rules that hold a node back go on to do so.

    Example: swarmnode resume
    """
    _tell_nodes("resume", name, home, as_json, wait_s=wait)


@command
def finish(
    name: str = NAME,
    leave: bool = option(False, "End the node then, as `swarmnode stop` does."),
    reason: str = REASON,
    home: Path = HOME,
    as_json: bool = JSON,
) -> None:
    """Let what runs come to its end, take nothing new, and then pause; the node stays, so that `swarmnode resume` goes on.

    Example: swarmnode finish friends --leave
    """
    _tell_nodes("finish", name, home, as_json, reason=reason, leave=leave)


@command
def reload(name: str = NAME, home: Path = HOME, as_json: bool = JSON) -> None:
    """Let a node read node.toml again: its rules and rates change at once, and it says what needs a restart.

    Example: swarmnode reload friends
    """
    _tell_nodes("reload", name, home, as_json)


@command
def stop(name: str = NAME, home: Path = HOME, as_json: bool = JSON) -> None:
    """Let a node leave its swarm in order, as Ctrl-C does where it runs.

    Example: swarmnode stop friends
    """
    _tell_nodes("stop", name, home, as_json)


def _tell_nodes(command: str, name: str, home: Path, as_json: bool, **more: Any) -> None:
    from swarmnode.lending.control_client import is_listening, running_nodes, tell_node

    nodes, failed = running_nodes(home), list[str]()
    if name and name not in nodes:
        fail(f"no node {name} runs here; `swarmnode ps` lists those that do", 2)
    alive = {node: path for node, path in nodes.items() if name in ("", node) and is_listening(path)}
    if not alive:
        fail("no node runs here; start one with `swarmnode run`")
    for node, path in alive.items():
        answer = tell_node(path, command, **more) or {"error": SILENT}
        if "error" in answer:
            failed.append(f"{node}: {answer['error']}")
        elif as_json:
            print_json({"node": node, **answer})
        else:
            say(f"{node}: {answer.get('told') or state_text(answer)}")
    if failed:
        fail("; ".join(failed))


def state_text(answer: dict[str, Any]) -> str:
    """The state, and why it is so."""
    return f"{answer['state']} ({answer['reason']})" if answer.get("reason") else str(answer["state"])


@command
def ps(home: Path = HOME, as_json: bool = JSON) -> None:
    """List the nodes and gateways that run on this machine: what they do, and why not more.

    Example: swarmnode ps
    """
    from swarmnode.lending.control_client import is_listening, running_gateways, running_nodes, tell_node

    sockets = [("run", *found) for found in running_nodes(home).items()]
    sockets += [("serve", *found) for found in running_gateways(home).items()]
    answers = [
        {"node": name, "does": does, **answer}
        for does, name, path in sockets
        if (answer := tell_node(path, "state") or (NO_ANSWER if is_listening(path) else None)) is not None
    ]
    if as_json:
        print_json(answers)
        return
    if not answers:
        say("No node runs here.")
        return
    from swarmnode.cli.terminal.tables import new_table, show

    columns = ("node", "does", "swarm", "pid", "state", "units", "sessions")
    table = new_table("", columns, numbers=("pid", "sessions"))
    for answer in answers:
        span = "{}:{}".format(*answer["span"]) if answer.get("span") else ""
        told = answer["node"], answer["does"], answer["swarm"], str(answer["pid"]), state_text(answer)
        table.add_row(*told, span, str(answer["sessions"]))
    show(table)
