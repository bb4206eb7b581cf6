"""`swarmnode status`: who is in a swarm, and whether the model is covered."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnode.cli.options.option import option
from swarmnode.cli.options.swarm import SWARM, open_swarm
from swarmnode.cli.terminal.console import HOME, JSON, Verbosity, command, print_json, ranges, run_async, unless_stopped
from swarmnode.cli.terminal.printable import one_line
from swarmnode.cli.terminal.swarm_news import SwarmNews, slowest_links
from swarmnode.counting import counted

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from swarmnode.client.swarm_client import SwarmClient

NAME_CHARS, DEVICE_CHARS, BAR_CHARS = 10, 10, 12
LINKED = 32  # peers between which links are compared
_DECORATION = re.compile(r"\((R|TM)\)|@.*|\b(NVIDIA|GeForce|AMD|Intel|Processor|CPU|Graphics)\b", re.IGNORECASE)


@command
def status(
    *,
    swarm: str = SWARM,
    watch: bool = option(
        False,
        "Keep showing it as it changes, with slow links, who comes, goes or moves, and which texts asked for here were moved.",
        "--watch",
        "-w",
    ),
    home: Path = HOME,
    as_json: bool = JSON,
    logs: Verbosity,
) -> None:
    """Show the peers of a swarm, the units that they hold, and whether the whole model is covered.

    Example: swarmnode status friends.swarm --watch
    """
    logs.begin()
    from swarmnode.client.swarm_client import SwarmClient
    from swarmnode.roles.credit.worker_credits import summary, worker_credits

    async def look(stop: asyncio.Event) -> None:
        async with await SwarmClient.join(open_swarm(swarm, home), home=home) as client:

            def status_of() -> dict[str, Any]:
                picture = client.status()
                return {**picture, "credit": list(map(summary, worker_credits(home, bytes.fromhex(picture["swarm"]))))}

            if watch and as_json:
                await unless_stopped(_tell(client, status_of), stop)
            elif watch:
                await unless_stopped(_watch(client, status_of, home), stop)
            elif as_json:
                print_json(status_of())
            else:
                from swarmnode.cli.terminal.tables import show

                show(status_table(status_of()))

    run_async(look)


async def _tell(client: SwarmClient, status_of: Callable[[], dict[str, Any]]) -> None:
    while True:
        print_json(status_of())
        await client.changed()


async def _watch(client: SwarmClient, status_of: Callable[[], dict[str, Any]], home: Path) -> None:
    from rich.live import Live

    async def look() -> dict[str, Any]:
        return {**status_of(), "reroutes": await asyncio.to_thread(reroutes_here, home, client.swarm.id.hex())}

    picture = await look()
    news = SwarmNews(picture)
    with Live(watched(picture, client.links(LINKED), news), auto_refresh=False) as live:
        while True:
            await client.changed()
            picture = await look()
            news.look(picture)
            live.update(watched(picture, client.links(LINKED), news), refresh=True)


def reroutes_here(home: Path, swarm_id: str) -> Counter[str]:
    """How often this home's gateways to a swarm have moved a text to another route, by cause. Waits for their answers."""
    from swarmnode.lending.control_client import running_gateways, tell_node

    answers = [tell_node(path, "state") or {} for path in running_gateways(home).values()]
    reroutes: Counter[str] = Counter()
    for told in answers:
        if told.get("swarm_id") == swarm_id:
            reroutes.update(told.get("reroutes", {}))
    return reroutes


def watched(picture: dict[str, Any], links: dict[str, Any], news: SwarmNews) -> Group:
    """The table, the slowest links, and what has changed lately."""
    from rich.console import Group
    from rich.text import Text

    slow = list(slowest_links(links, picture))
    lines = ["Slowest links", *slow, ""] if slow else []
    lines += ["Lately", *news.lines] if news.lines else []
    return Group(status_table(picture), Text("\n".join(lines), "dim", overflow="ellipsis", no_wrap=True))


def status_table(status: dict[str, Any]) -> Table:
    """The status as a table that 80 columns have room for: one row per peer, its span drawn over the model's units."""
    from rich.box import SIMPLE_HEAD
    from rich.text import Text

    from swarmnode.cli.terminal.tables import new_table

    units = status["units"]
    step = f"training step {status['training_step']}, " if status["mode"] == "train" else ""
    covered = Text("covered", "green")
    if status["missing"]:
        covered = Text(f"nobody holds {', '.join(ranges(status['missing']))}", "red")
    title = Text.assemble(one_line(f"swarm {status['name']}: {units} units, {step}"), covered)
    trains = status["mode"] == "train"
    # On one machine or LAN there is nothing to tell.
    far = any(peer["reached"] != "unknown" for peer in status["peers"])
    columns = ["peer", "name", "state", "device", "span", "units", "load"]
    columns += ["reached"] * far + ["sends"] * trains
    adapters = [one_line(f"adapters: {', '.join(status['adapters'])}")] if status["adapters"] else []
    caption = "\n".join([*adapters, *map(credit_line, status.get("credit", ()))]) or None
    table = new_table(title, columns, numbers=("load",), caption=caption)
    table.box, table.padding, table.pad_edge = SIMPLE_HEAD, (0, 1, 0, 0), False
    for peer in sorted(status["peers"], key=lambda peer: (peer["span"], peer["name"])):
        start, end = peer["span"]
        sends = ", ".join(f"{codec} to {other[-8:]}" for other, codec in peer["sends"].items())
        table.add_row(
            peer["peer"][-8:],
            cut(peer["name"], NAME_CHARS),
            peer["state"],
            cut(plain_device(peer["device"]), DEVICE_CHARS),
            f"{start}:{end}",
            draw_span(start, end, units),
            str(peer["sessions"]),
            *[peer["reached"]] * far,
            *[sends] * trains,
        )
    return table


def plain_device(name: str) -> str:
    """A device's name without what its maker adds: "RTX 3090", "Xeon"."""
    return " ".join(_DECORATION.sub(" ", name).split()) or name


def cut(text: str, chars: int) -> str:
    """The text, its end left out where it is too long."""
    return text if len(text) <= chars else f"{text[: chars - 1]}…"


def credit_line(credit: dict[str, Any]) -> str:
    """What clients signed for a node of this home."""
    by = counted(credit["clients"], "client")
    return f"your node {credit['worker'][-8:]}: {by} signed for {credit['signed']:,} units x tokens; credit {credit['credit']:,}"


def draw_span(start: int, end: int, units: int, width: int = BAR_CHARS) -> str:
    """A bar with the units [start, end) filled: `····████····`."""
    cells = min(units, width)
    return "".join(
        "█" if start < (cell + 1) * units / cells and end > cell * units / cells else "·" for cell in range(cells)
    )
