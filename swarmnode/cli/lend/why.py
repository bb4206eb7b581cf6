"""Command `swarmnode why`: show the facts behind what a node, a peer or a swarm does."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

from swarmnode.cli.lend.lending import state_text
from swarmnode.cli.options.asking import ask
from swarmnode.cli.options.swarm import complete_swarms
from swarmnode.terminal.console import HOME, JSON, LogOptions, command, fail, print_json, say
from swarmnode.terminal.formatting import format_duration, one_line, wrapped
from swarmnode.terminal.option import argument, option

TOPICS = {
    "placement": "Layers",
    "routing": "Route",
    "admission": "Text",
    "lending": "Lending",
    "audit": "Check",
    "reachability": "Connection",
    "training": "Training",
}


@command
def why(
    about: str = argument(
        "",
        "A machine's name or the end of its id, a session's trace id, or a layer's number; default: this machine's nodes.",
        metavar="[PEER|SESSION|LAYER]",
    ),
    swarm: str = option(
        "",
        "Ask this swarm's directory instead of this machine's nodes.",
        metavar="SWARM",
        autocompletion=complete_swarms,
    ),
    home: Path = HOME,
    as_json: bool = JSON,
) -> None:
    """Show each decision and the facts behind it.

    Learn why a node idles, pauses, refuses or holds its layers, why a machine is left out, and why a route was chosen.

    Example: swarmnode why 12
    """
    LogOptions().begin()
    explained = _ask_swarm(swarm, about, home) if swarm else _ask_nodes(about, home)
    if as_json:
        print_json(explained)
        return
    for node in explained:
        _tell(node, about)


def _ask_nodes(about: str, home: Path) -> list[dict[str, Any]]:
    from swarmnode.lending.control import running_gateways, running_nodes, tell_node

    asked = [*running_nodes(home).items()]
    asked += [(f"the gateway to {swarm}", path) for swarm, path in running_gateways(home).items()]
    answers = ((node, tell_node(path, "why", about=about)) for node, path in asked)
    explained = [{"node": node, **answer} for node, answer in answers if answer is not None]
    return explained or fail("no node runs here; ask a swarm's directory with --swarm NAME")


def _ask_swarm(swarm: str, about: str, home: Path) -> list[dict[str, Any]]:
    name, explained = ask(swarm, home, lambda client: (client.swarm.name, client.why(about)))
    return [{"node": f"the swarm {name}", "state": "as seen from here", **explained}]


def _tell(node: dict[str, Any], about: str) -> None:
    say(f"{node['node']}: {state_text(node)}")
    for fact in node["facts"]:
        say(wrapped(fact, "  ", "    "))
    for decision in node["decisions"]:
        ago = format_duration(max(0.0, time.time() - decision["at"]))
        often = f", {decision['times']} times" if decision["times"] > 1 else ""
        whom = f" ({', '.join(map(_called, decision['about']))})" if decision["about"] else ""
        say(wrapped(f"{TOPICS[decision['topic']]}, {ago} ago{often}: {decision['what']}{whom}", "  ", "    "))
        for fact in decision["facts"]:
            say(wrapped(fact, "    - ", "      "))
    if not node["facts"] and not node["decisions"]:
        say(f"  nothing is known about {one_line(about) or 'it'} here")


def _called(subject: str) -> str:
    """Return the part of an id that names it: the end of a peer's, the beginning of a session's."""
    return subject[:8] if re.fullmatch("[0-9a-f]{32}", subject) else subject[-8:]
