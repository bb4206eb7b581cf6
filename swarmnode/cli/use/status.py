"""Command `swarmnode status`: show the machines of a swarm, and whether they hold the whole model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnode.cli.options.file_options import output_path, write_output
from swarmnode.cli.options.swarm import SWARM, ask, open_swarm
from swarmnode.counting import counted, ranges
from swarmnode.errors import SwarmnodeError
from swarmnode.terminal.console import (
    HOME,
    JSON,
    Verbosity,
    command,
    fail,
    joined,
    print_json,
    run_async,
    say,
    unless_stopped,
)
from swarmnode.terminal.formatting import one_line, printable
from swarmnode.terminal.option import option, path_option
from swarmnode.terminal.progress import spinner

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from swarmnode.client.swarm_client import SwarmClient

NAME_CHARS, DEVICE_CHARS, BAR_CHARS = 10, 10, 12
LINKED = 32  # peers whose links are compared
_DECORATION = re.compile(r"\((R|TM)\)|@.*|\b(NVIDIA|GeForce|AMD|Intel|Processor|CPU|Graphics)\b", re.IGNORECASE)
KEPT = 6
SLOWEST = 3
CONFIG_S = 5.0  # for machines to send the model's config

Picture = Mapping[str, Any]


class SwarmNews:
    """Latest changes of a swarm, as lines of text with the time of day."""

    def __init__(self, picture: Picture, clock: Callable[[], str] = lambda: time.strftime("%H:%M:%S")) -> None:
        self._last = picture
        self._clock = clock
        self.lines: deque[str] = deque(maxlen=KEPT)

    def update(self, picture: Picture) -> None:
        """Add the changes since the last picture, and keep `picture` as the last one."""
        self.lines.extend(f"{self._clock()}  {change}" for change in changes(self._last, picture))
        self._last = picture


def changes(before: Picture, after: Picture) -> Iterator[str]:
    """Yield a sentence for each peer that came, left, moved or changed its state, and for the texts of this machine's gateways that
    moved to another route."""
    known, there = ({peer["peer"]: peer for peer in picture["peers"]} for picture in (before, after))
    for name in known.keys() - there.keys():
        yield f"{_called(known[name])} has left; it held {_units(known[name])}"
    for name, peer in there.items():
        earlier = known.get(name)
        if earlier is None:
            yield f"{_called(peer)} has joined with {_units(peer)}"
        elif tuple(earlier["span"]) != tuple(peer["span"]):
            yield f"{_called(peer)} moves from {_units(earlier)} to {_units(peer)}"
        elif earlier["state"] != peer["state"]:
            yield f"{_called(peer)} is {peer['state']}"
    were = before.get("reroutes", {})
    for cause, count in after.get("reroutes", {}).items():
        if count > were.get(cause, 0):
            yield f"{counted(count - were.get(cause, 0), 'text')} of yours moved to another route ({cause.replace('_', ' ')})"


def slowest_links(links: Mapping[str, Any], picture: Picture) -> Iterator[str]:
    """Yield a line for each of the `SLOWEST` links with the longest round trips between peers that hold units, with the bandwidth
    if it has been measured."""
    called = {peer["peer"]: _called(peer) for peer in picture["peers"]}
    peers: Sequence[str] = links["peers"]
    pairs = [(links["rtt_s"][a][b], a, b) for a in range(len(peers)) for b in range(a)]
    for rtt_s, a, b in sorted(pairs, reverse=True)[:SLOWEST]:
        rates = [rate for rate in (links["bandwidth_bps"][a][b], links["bandwidth_bps"][b][a]) if rate is not None]
        speed = f", {min(rates) / 1e6:.3g} Mbit/s" if rates else ""
        guessed = "" if links["measured"][a][b] else " (estimated)"
        yield f"{called.get(peers[b], peers[b][-8:])} - {called.get(peers[a], peers[a][-8:])}: {rtt_s * 1e3:.1f} ms{guessed}{speed}"


def _called(peer: Mapping[str, Any]) -> str:
    name = one_line(peer["name"])
    return f"{name} ({peer['peer'][-8:]})" if name else str(peer["peer"][-8:])


def _units(peer: Mapping[str, Any]) -> str:
    start, end = peer["span"]
    return f"layers {start}:{end}" if end > start else "no layers"


@command
def status(
    *,
    swarm: str = SWARM,
    watch: bool = option(
        False, "Keep watching: show changes, slow links, and your texts that moved to another route.", "--watch", "-w"
    ),
    export: bool = option(False, "Print the measured machines and links as a network for `plan`."),
    output: Path = path_option("With --export: write to this file.", "--output", "-o", parse=output_path),
    home: Path = HOME,
    as_json: bool = JSON,
    logs: Verbosity,
) -> None:
    """Show the machines of a swarm and their layers.

    It also shows whether they hold the whole model, and how long a text may be.

    Example: swarmnode status friends --watch

    Example: swarmnode status friends --export -o network.json
    """
    logs.begin()
    if export:
        _export(swarm, home, output)
        return
    if output is not None:
        fail("--output needs --export", 2)
    from swarmnode.client.swarm_client import SwarmClient
    from swarmnode.credit.receipts import summary, worker_credits

    async def show_status(stop: asyncio.Event) -> None:
        loaded = open_swarm(swarm, home)
        with spinner(f"Asking {loaded.name}", quiet=as_json):
            client = await joined(SwarmClient.join(loaded, home=home), stop)
        async with client:
            await _read_limits(client)

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
                from swarmnode.terminal.tables import show

                show(status_table(status_of()))

    run_async(show_status)


def _export(swarm: str, home: Path, output: Path | None) -> None:
    """Print the network of machines and links that the swarm has measured, or write it to the file `output`."""
    found: dict[str, Any] = ask(swarm, home, lambda client: client.network())
    if output is None:
        print_json(found)
        return
    write_output(output, json.dumps(found) + "\n")
    pairs = found["devices"] * (found["devices"] - 1)
    delays, bandwidths = (pairs - len(found["estimated"][field]) for field in ("delay_ms", "bandwidth_gbps"))
    say(
        f"Wrote {output}: {counted(found['devices'], 'machine')}; of {counted(pairs, 'link')} {counted(delays, 'delay')} and "
        f"{counted(bandwidths, 'bandwidth')} were "
        "measured, the others are estimated."
    )


async def _read_limits(client: SwarmClient) -> None:
    """Read the model's config, which has the number of positions of a text. If no machine sends it within `CONFIG_S` seconds, the
    status goes without that number."""
    if client.status()["peers"]:
        with contextlib.suppress(SwarmnodeError, asyncio.TimeoutError):
            await asyncio.wait_for(client.limits(), CONFIG_S)


async def _tell(client: SwarmClient, status_of: Callable[[], dict[str, Any]]) -> None:
    while True:
        print_json(status_of())
        await client.changed()


async def _watch(client: SwarmClient, status_of: Callable[[], dict[str, Any]], home: Path) -> None:
    from rich.live import Live

    async def read_picture() -> dict[str, Any]:
        return {**status_of(), "reroutes": await asyncio.to_thread(reroutes_here, home, client.swarm.id.hex())}

    picture = await read_picture()
    news = SwarmNews(picture)
    with Live(watched(picture, client.links(LINKED), news), auto_refresh=False) as live:
        while True:
            await client.changed()
            picture = await read_picture()
            news.update(picture)
            live.update(watched(picture, client.links(LINKED), news), refresh=True)


def reroutes_here(home: Path, swarm_id: str) -> Counter[str]:
    """Return how often this home's gateways to a swarm have moved a text to another route, by cause. Blocks while the gateways
    answer."""
    from swarmnode.lending.control import running_gateways, tell_node

    answers = [tell_node(path, "state") or {} for path in running_gateways(home).values()]
    reroutes: Counter[str] = Counter()
    for told in answers:
        if told.get("swarm_id") == swarm_id:
            reroutes.update(told.get("reroutes", {}))
    return reroutes


def watched(picture: dict[str, Any], links: dict[str, Any], news: SwarmNews) -> Group:
    """Return the status table with the slowest links and the latest changes."""
    from rich.console import Group
    from rich.text import Text

    slow = list(slowest_links(links, picture))
    lines = ["Slowest links", *slow, ""] if slow else []
    lines += ["Lately", *news.lines] if news.lines else []
    return Group(status_table(picture), Text(printable("\n".join(lines)), "dim", overflow="ellipsis", no_wrap=True))


def status_table(status: dict[str, Any]) -> Table:
    """Return the status as a table that fits 80 columns: one row per peer, its span drawn over the model's units."""
    from rich.text import Text

    from swarmnode.terminal.tables import new_table

    units = status["units"]
    step = f"training step {status['training_step']}, " if status["mode"] == "train" else ""
    covered = Text("all held", "green")
    if status["missing"]:
        covered = Text(f"no machine holds {', '.join(ranges(status['missing']))}", "red")
    positions = f"texts of up to {status['max_model_len']:,} tokens, " if status.get("max_model_len") else ""
    title = Text.assemble(one_line(f"{status['name']}: {positions}{step}{units} layers, "), covered)
    trains = status["mode"] == "train"
    # On one machine or LAN, nothing is known.
    far = any(peer["reached"] != "unknown" for peer in status["peers"])
    columns = ["id", "name", "state", "device", "layers", "of the model", "texts"]
    columns += ["reached"] * far + ["sends"] * trains
    notes = [one_line(f"adapters: {', '.join(status['adapters'])}")] if status["adapters"] else []
    if lent := sorted({model for peer in status["peers"] if (model := peer.get("draft_model"))}):
        notes.append(one_line(f"draft models: {', '.join(lent)}"))
    if ungiven := status.get("ungiven"):  # a node of an earlier version does not say
        notes.append(
            f"no machine gives the weights of layers {', '.join(ranges(ungiven))} to new machines: the host's model file "
            "was moved or changed, or its bootstrap peer is away"
        )
    caption = "\n".join([*notes, *map(credit_line, status.get("credit", ()))]) or None
    table = new_table(title, columns, numbers=("texts",), caption=caption, plain=True)
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
    """Return a device's name without its maker's additions: "RTX 3090", "Xeon"."""
    return " ".join(_DECORATION.sub(" ", name).split()) or name


def cut(text: str, chars: int) -> str:
    """Return the text; if it has more than `chars` characters, cut it and end it with an ellipsis."""
    return text if len(text) <= chars else f"{text[: chars - 1]}…"


def credit_line(credit: dict[str, Any]) -> str:
    """Return the sentence about the receipts that clients signed for a node of this home."""
    by = counted(credit["clients"], "client")
    return f"your node {credit['worker'][-8:]}: {by} signed for its work; credit {credit['credit']:,} (`swarmnode why credit`)"


def draw_span(start: int, end: int, units: int, width: int = BAR_CHARS) -> str:
    """Draw a bar with the units [start, end) filled: `····████····`."""
    cells = min(units, width)
    return "".join(
        "█" if start < (cell + 1) * units / cells and end > cell * units / cells else "·" for cell in range(cells)
    )
