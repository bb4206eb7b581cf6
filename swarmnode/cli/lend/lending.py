"""Commands for the nodes of this machine: `swarmnode ps`, `pause`, `resume`, `stop`, `config` and `config reload`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer import Context

from swarmnode.cli.options.metrics import Watch
from swarmnode.cli.options.node_file import FILE, LendingOptions
from swarmnode.cli.options.node_options import NodeOptions
from swarmnode.cli.options.swarm import full_name, home_of
from swarmnode.metrics.metric import Source
from swarmnode.terminal.console import HOME, JSON, command, fail, print_json, say
from swarmnode.terminal.option import argument, build, option

if TYPE_CHECKING:
    from swarmnode.node.node import Node


NO_ANSWER = {"swarm": "", "pid": "", "state": "no answer", "reason": "stopped, or busy", "sessions": ""}


def complete_nodes(context: Context, incomplete: str) -> list[str]:
    """Return the names of the nodes that run here and begin with `incomplete`."""
    from swarmnode.lending.control import running_nodes

    return [name for name in running_nodes(home_of(context)) if name.startswith(incomplete)]


NAME = argument(
    "", "Name of the node in `swarmnode ps`; default: all nodes.", metavar="[NAME]", autocompletion=complete_nodes
)
WAIT = option(
    60.0, "How long to wait until it is done; 0: do not wait.", "--wait", metavar="SECONDS", min=0.0, max=600.0
)
SILENT = "it does not answer: it is stopped (SIGSTOP) or hangs; if it stays so, end its process"
KEEP = ("disk", "memory")


@contextlib.asynccontextmanager
async def attended(
    node: Node,
    stop: asyncio.Event,
    watch: Watch,
    *,
    swarm: str,
    readings: Source,
    name: str = "",
    options: LendingOptions | None = None,
) -> AsyncIterator[None]:
    """Serve the node's control socket, in the home folder, and its metrics while the context lasts. `name` is its name in `ps`; by
    default the swarm's. `options` are those that the owner may change meanwhile; by default the rules of the home folder. Raises
    LocalError if the folder cannot be written or the metrics cannot be served."""
    from swarmnode.lending.control import ControlServer

    control = ControlServer(node.lending, stop, node.describe, node.why, options or LendingOptions(watch.home, node))
    async with watch.over(swarm, readings), control.listening(watch.home, name or swarm):
        yield


@command
def pause(
    name: str = NAME,
    keep: str = option("disk", "Keep the weights in memory, to resume sooner, or only on disk.", metavar="disk|memory"),
    after_work: bool = option(
        False, "First finish the running work, and accept nothing new; it does not wait for that."
    ),
    leave: bool = option(False, "With --after-work: then end the node, as `swarmnode stop` does."),
    reason: str = option("", "Reason that `swarmnode ps` shows."),
    wait: float = WAIT,
    home: Path = HOME,
    as_json: bool = JSON,
) -> None:
    """Free this machine until `swarmnode resume`.

    Running sessions move to other machines, and the device is released.

    Example: swarmnode pause --keep memory

    Example: swarmnode pause --after-work
    """
    if keep not in KEEP:
        fail(f"--keep {keep}: choose {' or '.join(KEEP)}", 2)
    if leave and not after_work:
        fail("--leave needs --after-work; to end a node at once: swarmnode stop", 2)
    if after_work:
        if keep != "disk":
            fail("--keep does not go with --after-work: give one of them", 2)
        _tell_nodes("finish", name, home, as_json, reason=reason, leave=leave)
        return
    _tell_nodes("pause", name, home, as_json, wait_s=wait, keep=keep, reason=reason)


@command
def resume(name: str = NAME, wait: float = WAIT, home: Path = HOME, as_json: bool = JSON) -> None:
    """Lend again after `pause`. Rules (hours, load, …) still apply.

    Example: swarmnode resume
    """
    _tell_nodes("resume", name, home, as_json, wait_s=wait)


@command
def reload(name: str = NAME, home: Path = HOME, as_json: bool = JSON) -> None:
    """Let a node read node.toml again. Its rules and rates change at once; it tells you which options need a restart.

    Example: swarmnode config reload friends
    """
    _tell_nodes("reload", name, home, as_json)


@command
def stop(name: str = NAME, home: Path = HOME, as_json: bool = JSON) -> None:
    """End a node in order.

    It does what Ctrl-C does in the node's terminal.

    Example: swarmnode stop friends
    """
    _tell_nodes("stop", name, home, as_json)


def _tell_nodes(command: str, name: str, home: Path, as_json: bool, **more: Any) -> None:
    from swarmnode.lending.control import is_listening, running_nodes, tell_node

    nodes, failed = running_nodes(home), list[str]()
    if name:
        name = full_name(name, nodes, f"no node {name} runs here", none="start one with `swarmnode run`")
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
    """Return the state of a node, with the reason if there is one."""
    return f"{answer['state']} ({answer['reason']})" if answer.get("reason") else str(answer["state"])


@command
def ps(home: Path = HOME, as_json: bool = JSON) -> None:
    """List what runs on this machine.

    It shows their work, their state, and the reason for it.

    Example: swarmnode ps
    """
    from swarmnode.lending.control import is_listening, running_gateways, running_nodes, tell_node

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
        say("No node runs here. Start one with `swarmnode run`.")
        return
    from swarmnode.terminal.tables import new_table, prevent_wrapping, show

    others = any(answer["swarm"] not in ("", answer["node"]) for answer in answers)  # else one column has both
    columns = ("node", "does", *(["swarm"] if others else []), "pid", "state", "layers", "texts")
    table = new_table("", columns, numbers=("pid", "texts"), plain=True)
    prevent_wrapping(table, "does", "pid", "layers")
    for answer in answers:
        span = "{}:{}".format(*answer["span"]) if answer.get("span") else ""
        swarm = [answer["swarm"]] if others else []
        told = answer["node"], answer["does"], *swarm, str(answer["pid"]), state_text(answer)
        table.add_row(*told, span, str(answer["sessions"]))
    show(table)


@command
def config(
    context: typer.Context,
    *,
    show: bool = option(False, "Print each option, its value, and the value's source."),
    as_json: bool = JSON,
) -> None:
    """Check the options that `run` would use.

    They come from the flags given here, the environment and node.toml. Add any options of `run`.

    Example: swarmnode config --show --memory 6GB
    """
    parent: Any = context.parent
    command = parent.command.get_command(parent, "run")
    taken = command.make_context("run", list(context.args), parent=parent)
    build(NodeOptions, taken.params).config()
    rows = [
        _row(taken, option) for option in command.params if option.param_type_name == "option" and not option.hidden
    ]
    if as_json:
        print_json(rows)
        return
    if not show:
        say(f"All options are valid. --show prints them, from flags, the environment and {FILE} in the home folder.")
        return
    from swarmnode.terminal import tables

    table = tables.new_table("", ("option", "value", "from"))
    for row in rows:
        table.add_row(row["option"], _value_text(row["value"]), row["from"])
    tables.show(table)


def _row(taken: Any, option: Any) -> dict[str, Any]:
    value, source = taken.params.get(option.name), taken.get_parameter_source(option.name)
    origins = {"COMMANDLINE": "flag", "ENVIRONMENT": f"environment {option.envvar}", "DEFAULT_MAP": "file"}
    origin = origins.get("" if source is None else source.name, "default")
    if origin == "file":
        origin = taken.meta["origins"][option.name]
    plain = value if isinstance(value, bool | int | float | list | None) else str(value)
    return {"option": option.opts[0], "value": plain, "from": origin}


def _value_text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value)
