"""The report: one page that needs nothing else, for a person to read."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import groupby
from typing import Any

from swarmnode.simulate.results.plots import bars, curves, matrix, spans
from swarmnode.simulate.results.summary import summary
from swarmnode.simulate.simulation import SimulationResult

MAX_ROWS = 64  # peers that are drawn
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:46em;margin:2em auto;padding:0 1em;color:#222}"
    "h1{font-size:1.5em}h2{font-size:1.15em;margin-top:2em}figure{margin:1.5em 0}figcaption{font-weight:600}"
    "svg{width:100%;font:11px system-ui,sans-serif;fill:#333}table{border-collapse:collapse}"
    "td,th{padding:.15em .9em .15em 0;text-align:left;border-bottom:1px solid #eee}"
    "td:nth-child(n+2),th:nth-child(n+2){text-align:right}"
)
PLOTS = (  # of the curves that were measured: title, names
    ("Tokens per second", ("tokens", "tokens trained")),
    ("Peers there, and sessions running", ("peers", "sessions running")),
    ("Share of their time that peers compute", ("share of time computing",)),
    ("Work per second that was lost with peers, and done again", ("lost, unit tokens", "replayed, unit tokens")),
    ("Seconds that the last training step took", ("last step, s",)),
)


def report(result: SimulationResult) -> str:
    """The page, as HTML."""
    figures = summary(result)
    title = f"A swarm that {figures['workload']}s {figures['model']} on {figures['scenario']}"
    sections = [
        _table(("", ""), _facts(figures)),
        "<h2>Over time</h2>",
        *_plots(result),
        "<h2>Latencies in seconds</h2>",
        _latencies(figures["latencies"]),
        "<h2>Who held what at the end</h2>",
        _holders(result),
        "<h2>The network, and who of it works together</h2>",
        *_network(result),
        "<h2>Where the bytes went</h2>",
        _bytes(result, figures["links"]),
        "<h2>In all</h2>",
        _table(("", ""), [(name, f"{value:,.6g}") for name, value in figures["totals"].items()]),
        f"<p>Simulated with the code that live nodes decide with. Settings: <code>{escape(repr(result.settings))}</code></p>",
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body><h1>{escape(title)}</h1>{''.join(sections)}</body></html>\n"
    )


def _facts(figures: dict[str, Any]) -> list[tuple[str, str]]:
    facts = [
        ("Peers", f"{figures['peers']:,}"),
        ("Time simulated", f"{figures['seconds'] / 60:.1f} min"),
        ("Peers that leave in an hour", f"{figures['churn_per_hour']:.0%}"),
        ("Tokens per second", f"{figures['tokens_per_s']:,.1f}"),
        ("Bytes over links", f"{figures['bytes'] / 1e9:,.2f} GB"),
        ("Share of their time that peers compute", f"{figures['utilisation']:.1%}"),
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


def _latencies(latencies: dict[str, dict[str, float]]) -> str:
    columns = ("count", "mean", "p50", "p90", "p99", "max")
    rows = [(name, *(f"{spread[column]:,.4g}" for column in columns)) for name, spread in latencies.items()]
    return _table(("", *columns), rows)


def _holders(result: SimulationResult) -> str:
    alive = sorted((peer for peer in result.world.peers if peer.serves), key=lambda peer: (peer.span, peer.index))
    step = max(1, -(-len(alive) // MAX_ROWS))
    seconds = result.settings.seconds
    rows = [
        (f"{peer.device.name} #{peer.index}", peer.span.start, peer.span.end, peer.busy_s / seconds)
        for peer in alive[::step]
    ]
    which = "Units of each peer" if step == 1 else f"Units of every {step}th peer"
    return spans(f"{which}; the darker, the more of its time it computed", result.model.units, rows)


def _network(result: SimulationResult) -> list[str]:
    """Bandwidths, and the bytes that went, between peers in the order of what they hold: the replicas of a stage are framed."""
    peers = sorted((peer for peer in result.world.peers if peer.alive), key=lambda peer: (peer.span, peer.index))
    peers, links = peers[:: max(1, -(-len(peers) // MAX_ROWS))], result.world.links
    blocks = [
        (f"units {span.start} to {span.end - 1}" if span.units else "stand by", len(list(members)))
        for span, members in groupby(peers, key=lambda peer: peer.span)
    ]
    pairs = [[(here.index, there.index) for there in peers] for here in peers]
    bandwidths = [[links.bandwidth_bps(*pair) * (pair[0] != pair[1]) for pair in row] for row in pairs]
    sent = [[links.bytes_sent.get(pair, 0.0) for pair in row] for row in pairs]
    return [
        matrix("Bandwidth from each to each; the darker, the faster", bandwidths, blocks),
        matrix("Bytes that went from each to each; the darker, the more", sent, blocks),
    ]


def _bytes(result: SimulationResult, links: Sequence[dict[str, Any]]) -> str:
    regions = result.scenario.regions
    rows = []
    for link in links:
        sender, receiver = link["from"], link["to"]
        label = f"{regions[sender] or ''} {sender} → {regions[receiver] or ''} {receiver}"
        rows.append((label, link["bytes"], f"{link['bytes'] / 1e6:,.1f} MB"))
    return bars("The busiest links", rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    header = line(head, "th") if any(head) else ""
    return f"<table>{header}{''.join(line(row, 'td') for row in rows)}</table>"
