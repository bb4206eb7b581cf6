"""`swarmnode ps`: the nodes that run on this machine."""

from __future__ import annotations

from pathlib import Path

from swarmnode.cli.lend.lending import state_text
from swarmnode.cli.terminal.console import HOME, JSON, default_home, print_json, reports_errors, say


@reports_errors
def ps(home: Path = HOME, as_json: bool = JSON) -> None:
    """List the nodes that run on this machine: what they do, and why not more.

    Example: swarmnode ps
    """
    from swarmnode.lending.control_client import running_nodes, tell_node

    answers = {node: tell_node(path, "state") for node, path in running_nodes(default_home(home)).items()}
    alive = {node: answer for node, answer in answers.items() if answer is not None}
    if as_json:
        print_json([{"node": node, **answer} for node, answer in alive.items()])
        return
    if not alive:
        say("No node runs here.")
        return
    from swarmnode.cli.terminal.tables import new_table, show

    table = new_table("", ("node", "swarm", "pid", "state", "units", "sessions"), numbers=("pid", "sessions"))
    for node, answer in alive.items():
        span = "" if answer["span"] is None else "{}:{}".format(*answer["span"])
        table.add_row(node, answer["swarm"], str(answer["pid"]), state_text(answer), span, str(answer["sessions"]))
    show(table)
