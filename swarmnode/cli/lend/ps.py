"""`swarmnode ps`: the nodes and gateways that run on this machine."""

from __future__ import annotations

from pathlib import Path

from swarmnode.cli.lend.lending import state_text
from swarmnode.cli.terminal.console import HOME, JSON, command, print_json, say

NO_ANSWER = {"swarm": "", "pid": "", "state": "no answer", "reason": "stopped, or busy", "sessions": ""}


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
