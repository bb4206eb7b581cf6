"""Report of a simulation: a summary as data, and a self-contained HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from swarmnode.counting import counted
from swarmnode.simulate.results.measures import PERCENTILES
from swarmnode.simulate.results.result_page import (
    IDLE,
    Machines,
    bars,
    curves,
    legend,
    network_map,
    network_matrix,
    page,
    spans,
    table,
)
from swarmnode.simulate.simulation import SimulationResult

MAX_ROWS = 64  # most peers whose units are drawn
MOST_COMPARED = 512  # most peers compared for the pictures of the network
MAX_ROLES = 48  # most roles in a legend
PLOTS = (  # title, names of measured curves
    ("Tokens or samples per second", ("tokens", "tokens trained", "samples trained")),
    ("Peers and running sessions", ("peers", "sessions running")),
    ("Share of time that peers compute", ("share of time computing",)),
    ("Work per second that was lost with peers, and repeated", ("lost, unit tokens", "replayed, unit tokens")),
    ("Duration of the last training step in seconds", ("last step, s",)),
)
BUSIEST = 20  # links that are listed


def summary(result: SimulationResult) -> dict[str, Any]:
    """Return all results as data for JSON. For the same settings everything but "decisions" (CPU times) is the same, bit for
    bit."""
    settings, measures = result.settings, result.measures
    places = result.world.links.places
    carried: dict[tuple[int, int], float] = {}
    for (sender, receiver), size_bytes in result.world.links.bytes_sent.items():
        link = places[sender], places[receiver]
        carried[link] = carried.get(link, 0.0) + size_bytes
    busiest = sorted(carried.items(), key=lambda item: (-item[1], item[0]))[:BUSIEST]
    return {
        "scenario": result.scenario.name,
        "model": result.model.name,
        "workload": settings.workload,
        "seed": settings.seed,
        "seconds": settings.seconds,
        "peers": len(result.world.peers),
        "churn_per_hour": settings.churn,
        "events": result.events,
        **_rates(result),
        "totals": dict(sorted(measures.totals.items())),
        "latencies": {name: _spread(values) for name, values in sorted(measures.values.items())},
        "utilisation": result.world.utilisation(),
        "links": [{"from": sender, "to": receiver, "bytes": size_bytes} for (sender, receiver), size_bytes in busiest],
        "bytes": sum(result.world.links.bytes_sent.values()),
        "curves": {"seconds": measures.times_s, **measures.curves},
        "decisions": {name: _spread(values) for name, values in sorted(measures.decision_s.items())},
    }


def _rates(result: SimulationResult) -> dict[str, float]:
    counted = result.model.counted
    name = counted if result.settings.workload == "serve" else f"{counted} trained"
    return {f"{counted}_per_s": result.measures.totals.get(name, 0.0) / result.settings.seconds}


def _spread(values: list[float]) -> dict[str, float]:
    spread = {f"p{percent}": float(np.percentile(values, percent)) for percent in PERCENTILES}
    return {"count": len(values), "mean": sum(values) / len(values), **spread, "max": max(values)}


def report(result: SimulationResult) -> str:
    """Build the report page as HTML."""
    figures = summary(result)
    title = f"A swarm that {figures['workload']}s {figures['model']} on {figures['scenario']}"
    latencies = figures["latencies"]
    columns = ("count", "mean", "p50", "p90", "p99", "max")
    rows = [(name, *(f"{spread[column]:,.4g}" for column in columns)) for name, spread in latencies.items()]
    sections = [
        table(("", ""), _facts(figures, result.model.counted), numbers=[1]),
        "<h2>Over time</h2>",
        *_plots(result),
        "<h2>Latencies in seconds</h2>",
        table(("", *columns), rows, numbers=range(1, len(columns) + 1)),
        "<h2>Layers of each peer at the end</h2>",
        _holders(result),
        "<h2>The network and its traffic</h2>",
        *_network(result),
        "<h2>Traffic of the links</h2>",
        _bytes(result, figures["links"]),
        "<h2>Totals</h2>",
        table(("", ""), [(name, f"{value:,.6g}") for name, value in figures["totals"].items()], numbers=[1]),
        "<p>A simulation: peers and links are modelled, decisions are made by the code of nodes. "
        f"Settings: <code>{escape(repr(result.settings))}</code></p>",
    ]
    return page(title, sections)


def _facts(figures: dict[str, Any], what: str) -> list[tuple[str, str]]:
    facts = [
        ("Peers", f"{figures['peers']:,}"),
        ("Simulated time", f"{figures['seconds'] / 60:.1f} min"),
        ("Peers that leave per hour", f"{figures['churn_per_hour']:.0%}"),
        (f"{what.capitalize()} per second", f"{figures[f'{what}_per_s']:,.1f}"),
        ("Bytes over links", f"{figures['bytes'] / 1e9:,.2f} GB"),
        ("Share of time that peers compute", f"{figures['utilisation']:.1%}"),
    ]
    for name in ("first token, s", "between tokens, s", "step, s"):
        if name in figures["latencies"]:
            facts.append((f"Median {name.removesuffix(', s')}", f"{figures['latencies'][name]['p50']:.3g} s"))
    return facts


def _plots(result: SimulationResult) -> list[str]:
    measures = result.measures
    drawn = []
    for title, names in PLOTS:
        lines: dict[str, Sequence[float]] = {name: measures.curves[name] for name in names if name in measures.curves}
        if lines:
            drawn.append(curves(title, measures.times_s, lines))
    return drawn


def _holders(result: SimulationResult) -> str:
    alive = sorted((peer for peer in result.world.peers if peer.serves), key=lambda peer: (peer.span, peer.index))
    step = max(1, -(-len(alive) // MAX_ROWS))
    seconds = result.settings.seconds
    rows = [
        (f"{peer.device.name} #{peer.index}", peer.span.start, peer.span.end, peer.busy_s / seconds)
        for peer in alive[::step]
    ]
    which = "Layers of each peer" if step == 1 else f"Layers of every {step}th peer"
    return spans(f"{which}; the stronger the colour, the more of its time it computed", result.model.units, rows)


def _network(result: SimulationResult) -> list[str]:
    """Draw a map and a matrix of the peers alive at the end, with the bytes sent, and a legend of their layers."""
    machines = _machines(result).shown()
    carried = "bytes sent"
    held = [
        (name, counted(machines.roles.count(role), "peer")) for role, name in enumerate(machines.role_names[:MAX_ROLES])
    ]
    return [
        network_map(machines, carried),
        network_matrix(machines, carried),
        legend("Units that the peers hold", held),
    ]


def _machines(result: SimulationResult) -> Machines:
    world, network = result.world, result.scenario
    peers = [peer for peer in world.peers if peer.alive]
    peers = peers[:: max(1, -(-len(peers) // MOST_COMPARED))]
    numbers = {peer.index: number for number, peer in enumerate(peers)}
    held = sorted({peer.span for peer in peers if peer.span.units})
    places = [world.links.places[peer.index] for peer in peers]
    return Machines(
        tuple(f"#{peer.index} {network.regions[place] or ''}" for peer, place in zip(peers, places, strict=True)),
        tuple(network.regions[place] for place in places),
        *world.links.between([peer.index for peer in peers]),
        tuple(held.index(peer.span) if peer.span.units else IDLE for peer in peers),
        tuple(f"layers {span.start} to {span.end - 1}" for span in held),
        {
            (numbers[here], numbers[there]): size_bytes
            for (here, there), size_bytes in world.links.bytes_sent.items()
            if here in numbers and there in numbers
        },
    )


def _bytes(result: SimulationResult, links: Sequence[dict[str, Any]]) -> str:
    network = result.scenario
    rows = []
    for link in links:
        sender, receiver = link["from"], link["to"]
        label = f"{network.label(sender)} → {network.label(receiver)}"
        rows.append((label, link["bytes"], f"{link['bytes'] / 1e6:,.1f} MB"))
    return bars("The busiest links", rows)
