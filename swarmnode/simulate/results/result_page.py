"""Self-contained HTML page with SVG figures: no scripts, no external files; light or dark as the reader's screen is.

Pictures of a network as SVG: a map of clusters of machines by their delays, and a matrix of bandwidths, both with the traffic.

Coordinates follow from the delays alone (classical scaling: Torgerson, Psychometrika 17, 1952), so that any network has a map;
clusters that would overlap are pushed apart.

Machines of a network as pictures show them: roles, traffic, and clusters of machines near one another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise

import numpy as np

from swarmnode.plan.cost import transfer_s
from swarmnode.plan.offline.grid import TINY_S, dendrogram
from swarmnode.plan.offline.planner_files import Scenario
from swarmnode.plan.spans.flow import Floats

LIGHT = (
    "--ink:#222;--paper:#fff;--rule:#ddd;--c0:#2a6f97;--c1:#d1495b;--c2:#4f8a6f;--c3:#7d5ba6;--c4:#b97708;--c5:#5f6b6d"
)
DARK = "--ink:#e4e6e8;--paper:#16181b;--rule:#3a3f45;--c0:#6cb6e0;--c1:#ff8a70;--c2:#8fd0ae;--c3:#bda0e6;--c4:#f2b950;--c5:#a3b0b3"
STYLE = (
    f":root{{color-scheme:light dark;{LIGHT}}}@media(prefers-color-scheme:dark){{:root{{{DARK}}}}}"
    "body{font:15px/1.5 system-ui,sans-serif;max-width:46em;margin:2em auto;padding:0 1em;color:var(--ink);background:var(--paper)}"
    "h1{font-size:1.5em}h2{font-size:1.15em;margin-top:2em}figure{margin:1.5em 0}figcaption{font-weight:600}"
    "svg{width:100%;font:11px system-ui,sans-serif;fill:var(--ink)}table{border-collapse:collapse}code{overflow-wrap:anywhere}"
    "td,th{padding:.15em .9em .15em 0;text-align:left;border-bottom:1px solid var(--rule)}"
    ".wide{overflow-x:auto}td.number,th.number{text-align:right}"
)
WIDTH, HEIGHT = 640, 200
MAX_LABEL_CHARS = 22
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 10, 28  # margins
COLOURS = tuple(f"var(--c{number})" for number in range(6))  # variables of STYLE


def curves(title: str, times_s: Sequence[float], lines: dict[str, Sequence[float]]) -> str:
    """Draw curves as an SVG figure with a legend: `lines` are values by name, at `times_s`."""
    highest = _round_up(max((value for line in lines.values() for value in line), default=0.0))
    latest_s = max(times_s, default=1.0)
    parts = [_frame(highest, latest_s)]
    for number, (name, line) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(
            f"{_x(time_s / latest_s):.1f},{_y(value / highest):.1f}"
            for time_s, value in zip(times_s, line, strict=True)
        )
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{points}"/>')
        parts.append(_legend(number, name, colour))
    return figure(title, "".join(parts), HEIGHT)


def bars(title: str, rows: Sequence[tuple[str, float, str]]) -> str:
    """Draw a horizontal bar for each of `rows`: (label, value, value in words)."""
    highest = max((value for _, value, _ in rows), default=0.0) or 1.0
    row_height = 18
    parts = []
    for number, (label, value, words) in enumerate(rows):
        y, width = TOP + number * row_height, (WIDTH - 300) * value / highest
        parts.append(f'<text x="176" y="{y + 13}" text-anchor="end">{escape(label)}</text>')
        parts.append(
            f'<rect x="182" y="{y + 2}" width="{width:.1f}" height="{row_height - 5}" fill="{COLOURS[0]}"/>'
            f'<text x="{188 + width:.1f}" y="{y + 13}">{escape(words)}</text>'
        )
    return figure(title, "".join(parts), TOP + len(rows) * row_height + 6)


def spans(title: str, units: int, rows: Sequence[tuple[str, int, int, float]]) -> str:
    """Draw the layers that each peer holds, a line for each of `rows`: (label, start, end, share of the time that it computed)."""
    row_height = 11 if len(rows) > 20 else 16
    width = WIDTH - 200 - RIGHT
    parts = []
    for number, (label, start, end, share) in enumerate(rows):
        y = TOP + number * row_height
        left, right = 190 + width * start / units, 190 + width * end / units
        parts.append(f'<text x="184" y="{y + row_height - 3}" text-anchor="end">{escape(label)}</text>')
        parts.append(
            f'<rect x="{left:.1f}" y="{y + 1}" width="{right - left:.1f}" height="{row_height - 2}" '
            f'fill="{COLOURS[0]}" fill-opacity="{0.15 + 0.85 * min(1.0, share):.2f}">'
            f"<title>{escape(label)}: units {start} to {end - 1}, computing {share:.0%} of the time</title></rect>"
        )
    bottom = TOP + len(rows) * row_height + 14
    for unit in (0, units):
        parts.append(f'<text x="{190 + width * unit / units:.1f}" y="{bottom}" text-anchor="middle">{unit}</text>')
    return figure(title, "".join(parts), bottom + 8)


def role_colour(role: int, roles: int) -> str:
    """Return the CSS colour of `role` of `roles`: hues in order, none of them pale."""
    return f"hsl({200 + 300 * role / max(1, roles):.0f} 55% 42%)"


def legend(title: str, roles: Sequence[tuple[str, str]]) -> str:
    """Draw the numbered colours of `roles`: (name, value in words)."""
    columns, row_height = 2, 17
    parts = []
    for number, (name, words) in enumerate(roles):
        x, y = LEFT / 2 + number % columns * (WIDTH - LEFT) / columns, TOP + number // columns * row_height
        parts.append(
            f'<rect x="{x:.1f}" y="{y}" width="18" height="13" fill="{role_colour(number, len(roles))}"/>'
            f'<text x="{x + 9:.1f}" y="{y + 10}" text-anchor="middle" style="fill:#fff">{number}</text>'
            f'<text x="{x + 23:.1f}" y="{y + 10}">{escape(shortened(name))} ({escape(words)})</text>'
        )
    return figure(title, "".join(parts), TOP + -(-len(roles) // columns) * row_height + 4)


def shortened(text: str) -> str:
    """Cut `text` to `MAX_LABEL_CHARS` characters, with "…" at the end if it was longer."""
    return text if len(text) <= MAX_LABEL_CHARS else text[: MAX_LABEL_CHARS - 1] + "…"


def figure(title: str, inside: str, height: float) -> str:
    """Build a figure with `title` above an SVG picture of width `WIDTH`; `inside` is its SVG content."""
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" '
        f'aria-label="{escape(title)}">{inside}</svg></figure>'
    )


def _frame(highest: float, latest_s: float) -> str:
    """Draw horizontal lines and labels of both axes, four steps each."""
    lines = []
    for step in range(5):
        y, x = _y(step / 4), _x(step / 4)
        lines.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" stroke="var(--rule)"/>')
        lines.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{_short(highest * step / 4)}</text>')
        lines.append(f'<text x="{x}" y="{HEIGHT - 8}" text-anchor="middle">{_clock(latest_s * step / 4)}</text>')
    return "".join(lines)


def _legend(number: int, name: str, colour: str) -> str:
    x = LEFT + 10 + 170 * (number % 3)
    y = TOP + 10 + 14 * (number // 3)
    return f'<rect x="{x}" y="{y - 8}" width="10" height="8" fill="{colour}"/><text x="{x + 14}" y="{y}">{escape(name)}</text>'


def _x(share: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * share


def _y(share: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * share


def _round_up(value: float) -> float:
    """Return the next 1, 2, 4, 5, 8 or 10 times a power of ten, for an axis that people can read; 1.0 for 0 or less."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * step for step in (1, 2, 4, 5, 8, 10) if power * step >= value * (1 - 1e-9))


def _short(value: float) -> str:
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:.3g}"


def _clock(seconds: float) -> str:
    minutes = seconds / 60
    return f"{seconds:.0f} s" if seconds < 120 else f"{minutes:.3g} min" if minutes < 180 else f"{minutes / 60:.3g} h"


def page(title: str, sections: Sequence[str]) -> str:
    """Return the whole HTML page with this `title`; `sections` are HTML."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>"
        f"<body><h1>{escape(title)}</h1>{''.join(sections)}</body></html>\n"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[int] | range) -> str:
    """Build an HTML table of text; columns in `numbers` are aligned right. An empty `head` gives no header row."""

    def line(cells: Sequence[str], tag: str) -> str:
        kinds = (' class="number"' if column in numbers else "" for column in range(len(cells)))
        return (
            "<tr>"
            + "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for cell, kind in zip(cells, kinds, strict=True))
            + "</tr>"
        )

    header = line(head, "th") if any(head) else ""
    return f'<div class="wide"><table>{header}{"".join(line(row, "td") for row in rows)}</table></div>'


MOST = 128  # machines that a picture shows
APART = 2.0  # least ratio of the time of links between clusters to that of links inside
MESSAGE_BYTES = 1e6  # size of the message whose transfer time is the distance of two machines
IDLE = -1  # role of a machine that does nothing


@dataclass(frozen=True, eq=False)
class Machines:
    """N machines of a network. `roles`: per machine an index into `role_names`, or IDLE. `traffic`: amount sent from one
    machine to another, by their indexes, in any layer."""

    names: tuple[str, ...]
    regions: tuple[str | None, ...]
    delay_s: Floats  # [N, N], from row to column, one way
    bandwidth_bps: Floats  # [N, N]
    roles: tuple[int, ...]
    role_names: tuple[str, ...]
    traffic: Mapping[tuple[int, int], float]

    def __repr__(self) -> str:
        return f"<Machines: {len(self.names)} in {len(self.role_names)} roles>"

    def only(self, chosen: Sequence[int]) -> Machines:
        """Return the `chosen` machines alone, in the order of `chosen`."""
        pairs, number = np.ix_(chosen, chosen), {machine: at for at, machine in enumerate(chosen)}
        return replace(
            self,
            names=tuple(self.names[machine] for machine in chosen),
            regions=tuple(self.regions[machine] for machine in chosen),
            delay_s=self.delay_s[pairs],
            bandwidth_bps=self.bandwidth_bps[pairs],
            roles=tuple(self.roles[machine] for machine in chosen),
            traffic={
                (number[here], number[there]): amount
                for (here, there), amount in self.traffic.items()
                if here in number and there in number
            },
        )

    def shown(self) -> Machines:
        """Return at most `MOST` machines, busy ones first choice, ordered so that clusters are side by side."""
        by_role = sorted(range(len(self.names)), key=lambda machine: (self.roles[machine] == IDLE, machine))
        busy = by_role[: len(by_role) - self.roles.count(IDLE)] or by_role
        kept = by_role[:MOST] if len(busy) <= MOST else busy[:: -(-len(busy) // MOST)]
        some = self.only(sorted(kept))
        return some.only(dendrogram(some.apart_s()).order)

    def apart_s(self) -> Floats:
        """Return [N, N] seconds that a message of `MESSAGE_BYTES` takes between each two machines, in the slower direction."""
        one_way_s = transfer_s(MESSAGE_BYTES, self.delay_s, self.bandwidth_bps)
        both_s: Floats = np.maximum(one_way_s, one_way_s.T)
        return both_s

    def clusters(self) -> list[list[int]]:
        """Return clusters of machines near one another, by index, cut at the largest relative step in link times; one cluster
        if no step is large enough."""
        tree = dendrogram(self.apart_s())
        values = np.unique(tree.gaps)
        steps = values[1:] / np.maximum(values[:-1], TINY_S)
        return tree.clusters(
            float("inf") if not len(steps) or steps.max() < APART else float(values[int(steps.argmax())])
        )

    def place(self, cluster: Sequence[int]) -> str:
        """Return a name for `cluster`: its only machine, the region that all its machines are in, or its first machine and "n
        more"."""
        regions = {self.regions[machine] for machine in cluster}
        first, *others = cluster
        if not others:
            return self.names[first]
        return (len(regions) == 1 and self.regions[first]) or f"{self.names[first]} and {len(others)} more"


def planned_machines(
    network: Scenario, stages: Sequence[Sequence[int]], stage_names: Sequence[str], pipelines: Sequence[Sequence[int]]
) -> Machines:
    """Return the devices of `network` with their stages of a plan as roles. The traffic is 1 for each hop of the `pipelines`."""
    role_of = {device: stage for stage, members in enumerate(stages) for device in members}
    return Machines(
        tuple(network.label(device) for device in range(network.devices)),
        network.regions,
        network.delay_s,
        network.bandwidth_bps,
        tuple(role_of.get(device, IDLE) for device in range(network.devices)),
        tuple(stage_names),
        dict.fromkeys(_hops(pipelines), 1.0),
    )


def _hops(pipelines: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
    for pipeline in pipelines:
        yield from pairwise(pipeline)


MOST_HEIGHT, MARGIN = 440, 30
LEAST_RADIUS, MOST_RADIUS, ROOM = 7.0, 15.0, 75.0  # radius of a machine: the more machines, the smaller
SPACING = 1.3  # distance of the machines in a cluster, in radii
GOLDEN_ANGLE = math.pi * (3 - math.sqrt(5))
ROUNDS = 200  # most rounds of pushing clusters apart
MOST_LINES = 400
MATRIX_LEFT, MATRIX_TOP, ROLE_WIDTH = 150, 10, 26
SIDE = WIDTH - MATRIX_LEFT - ROLE_WIDTH - 14
SHADES = 8
MOST_CELL = 40
LEAST_LABEL = 10.0  # height of a line that can be read


def network_matrix(machines: Machines, carried: str) -> str:
    """Draw the bandwidth from each machine (row) to each other (column) as HTML: the stronger the colour, the more bandwidth,
    on a logarithmic scale. Dots show the traffic, named by `carried`: the larger, the more. Clusters are framed; a bar
    beside each row shows its role, none that it is idle."""
    count = len(machines.names)
    cell = min(MOST_CELL, max(1, SIDE // max(1, count)))  # whole, or there are gaps between neighbours
    apart = ~np.eye(len(machines.names), dtype=bool) & (machines.bandwidth_bps > 0)
    known = machines.bandwidth_bps[apart]
    least_bps, most_bps = (float(known.min()), float(known.max())) if known.size else (0.0, 0.0)
    inside = [
        *_cells(machines, cell, least_bps, most_bps),
        *_dots(machines, cell),
        *_clusters(machines, cell),
        *_rows(machines, cell),
    ]
    ends = f"{rate(least_bps)} to {rate(most_bps)} where the colour is strongest"
    title = f"Bandwidth from each machine (row) to each (column), from {ends}; dots: {carried}"
    return figure(title, "".join(inside), MATRIX_TOP + cell * count + 8)


def rate(bps: float) -> str:
    """Format a bandwidth, for example "8 Mbit/s"."""
    unit, size = ("Gbit/s", 1e9) if bps >= 1e9 else ("Mbit/s", 1e6) if bps >= 1e6 else ("kbit/s", 1e3)
    return f"{bps / size:.3g} {unit}"


def _cells(machines: Machines, cell: float, least_bps: float, most_bps: float) -> Iterator[str]:
    """Yield one path for each shade; separate cells would make the page ten times as long."""
    decades = math.log(most_bps / least_bps) if most_bps > least_bps else 1.0
    paths: dict[int, list[str]] = {}
    for row, line in enumerate(machines.bandwidth_bps.tolist()):
        for column, bps in enumerate(line):
            if row != column and bps > 0:
                shade = round(SHADES * math.log(bps / least_bps) / decades)
                x, y = _left(column, cell), MATRIX_TOP + cell * row
                paths.setdefault(shade, []).append(f"M{x:.1f} {y:.1f}h{cell:.1f}v{cell:.1f}h-{cell:.1f}z")
    for shade, path in sorted(paths.items()):
        strength = 0.1 + 0.8 * shade / SHADES
        yield f'<path d="{"".join(path)}" fill="var(--c0)" fill-opacity="{strength:.2f}" shape-rendering="crispEdges"/>'


def _dots(machines: Machines, cell: float) -> Iterator[str]:
    most = max(machines.traffic.values(), default=0.0)
    for (here, there), amount in machines.traffic.items():
        if here != there and amount > 0:
            radius = cell * (0.12 + 0.22 * amount / most)
            x, y = _left(there + 0.5, cell), MATRIX_TOP + cell * (here + 0.5)
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="var(--c1)"/>'


def _clusters(machines: Machines, cell: float) -> Iterator[str]:
    """Yield a frame around the cells of each cluster."""
    for cluster in machines.clusters():
        first, side = min(cluster), cell * len(cluster)
        yield (
            f'<rect x="{_left(first, cell):.1f}" y="{MATRIX_TOP + cell * first:.1f}" width="{side:.1f}" height="{side:.1f}" '
            'fill="none" stroke="var(--c1)" stroke-width="1.5"/>'
        )


def _rows(machines: Machines, cell: float) -> Iterator[str]:
    """Yield the bars of roles, and the names: of each machine if rows are high enough, else of each cluster that is."""
    for row, role in enumerate(machines.roles):
        if role != IDLE:
            y, words = MATRIX_TOP + cell * row, f"{machines.names[row]}: {machines.role_names[role]}"
            yield (
                f'<rect x="{MATRIX_LEFT + 4}" y="{y:.1f}" width="{ROLE_WIDTH - 8}" height="{cell:.1f}" '
                f'fill="{role_colour(role, len(machines.role_names))}"><title>{escape(words)}</title></rect>'
            )
    groups = [[row] for row in range(len(machines.names))] if cell >= LEAST_LABEL else machines.clusters()
    for group in groups:
        if cell * len(group) >= LEAST_LABEL:
            yield _label(machines.place(group), MATRIX_TOP + cell * (min(group) + len(group) / 2))


def _label(text: str, y: float) -> str:
    return f'<text x="{MATRIX_LEFT - 2}" y="{y + 4:.1f}" text-anchor="end">{escape(shortened(text))}</text>'


def _left(column: float, cell: float) -> float:
    return MATRIX_LEFT + ROLE_WIDTH + cell * column


def network_map(machines: Machines, carried: str) -> str:
    """Draw a map of the machines as HTML, with the number of each role and lines for the traffic, named by `carried`; empty if
    all machines are one cluster."""
    clusters = machines.clusters()
    if len(clusters) < 2:
        return ""
    count = len(machines.names)
    radius = min(MOST_RADIUS, max(LEAST_RADIUS, ROOM / math.sqrt(count)))
    radii_C = np.array([radius * (1 + SPACING * math.sqrt(len(cluster))) for cluster in clusters])
    centres_C2, scale = _fitted(_pushed_apart(_scattered(machines, clusters), radii_C), radii_C)
    at_N2 = np.zeros((count, 2))
    for cluster, centre in zip(clusters, centres_C2, strict=True):
        by_role = sorted(cluster, key=lambda machine: machines.roles[machine])
        at_N2[by_role] = centre + scale * radius * SPACING * _sunflower(len(cluster))
    inside = [
        *_lines(machines, at_N2),
        *_machines(machines, at_N2, scale * radius),
        *_names(machines, clusters, centres_C2, scale * radii_C),
    ]
    height = float((centres_C2[:, 1] + scale * radii_C).max()) + MARGIN
    title = f"The network by its delays: the nearer, the shorter; lines: {carried}; numbers: what each holds"
    return figure(title, "".join(inside), height)


def coordinates(distance_NN: Floats) -> Floats:
    """Return [N, 2] points in the plane whose distances approximate `distance_NN` (classical scaling)."""
    squares_NN = distance_NN**2
    centred_NN = squares_NN - squares_NN.mean(axis=0) - squares_NN.mean(axis=1)[:, None] + squares_NN.mean()
    values_N, vectors_NN = np.linalg.eigh(-centred_NN / 2)
    largest = np.argsort(-values_N, kind="stable")[:2]
    axes_N2 = vectors_NN[:, largest] * np.sqrt(np.maximum(values_N[largest], 0.0))
    # Fix the signs, so that the map is the same on every machine.
    signs_2 = np.sign(axes_N2[np.abs(axes_N2).argmax(axis=0), range(axes_N2.shape[1])])
    at_N2: Floats = np.zeros((len(distance_NN), 2))
    at_N2[:, : axes_N2.shape[1]] = axes_N2 * np.where(signs_2 == 0, 1, signs_2)
    return at_N2


def _scattered(machines: Machines, clusters: Sequence[Sequence[int]]) -> Floats:
    """Return [C, 2] centres of the clusters by the mean delay between their machines, scaled to the picture."""
    count = len(clusters)
    delay_s = (machines.delay_s + machines.delay_s.T) / 2
    between_CC = np.array([[delay_s[np.ix_(one, other)].mean() for other in clusters] for one in clusters])
    between_CC[np.eye(count, dtype=bool)] = 0.0
    at_C2 = coordinates(between_CC)
    widest = float(np.abs(at_C2).max())
    around = np.array([(math.cos(turn), math.sin(turn)) for turn in 2 * math.pi * np.arange(count) / count])
    return at_C2 / widest * (WIDTH / 2.4) + around if widest > 0 else around * MOST_HEIGHT / 4


def _pushed_apart(centres_C2: Floats, radii_C: Floats) -> Floats:
    """Return the centres after pushing overlapping circles apart, for at most `ROUNDS` rounds."""
    centres_C2 = centres_C2.copy()
    for _ in range(ROUNDS):
        apart_CC2 = centres_C2[:, None] - centres_C2[None]
        distance_CC = np.hypot(*apart_CC2.transpose(2, 0, 1))
        wanted_CC = 1.15 * (radii_C[:, None] + radii_C[None])
        lacking_CC = np.maximum(0.0, wanted_CC - distance_CC)
        np.fill_diagonal(lacking_CC, 0.0)
        if lacking_CC.max() < 0.5:
            break
        ways_CC2 = apart_CC2 / np.maximum(distance_CC, 1e-6)[:, :, None]
        centres_C2 += (ways_CC2 * lacking_CC[:, :, None] / 2).sum(axis=1)
    return centres_C2


def _fitted(centres_C2: Floats, radii_C: Floats) -> tuple[Floats, float]:
    """Return the centres moved and scaled into the picture, and the scale (at most 1)."""
    lowest_2 = (centres_C2 - radii_C[:, None]).min(axis=0)
    extent_2 = (centres_C2 + radii_C[:, None]).max(axis=0) - lowest_2
    scale = float(min(1.0, (WIDTH - 2 * MARGIN) / extent_2[0], (MOST_HEIGHT - 2 * MARGIN) / extent_2[1]))
    corner_2 = np.array([(WIDTH - scale * extent_2[0]) / 2, MARGIN / 2])
    return corner_2 + scale * (centres_C2 - lowest_2), scale


def _sunflower(count: int) -> Floats:
    """Return [count, 2] points, spread evenly over a disc of radius sqrt(count)."""
    turns = GOLDEN_ANGLE * np.arange(count)
    out = np.sqrt(np.arange(count) + 0.5 * (count > 1))
    points: Floats = np.stack([out * np.cos(turns), out * np.sin(turns)], axis=1)
    return points


def _lines(machines: Machines, at_N2: Floats) -> Iterator[str]:
    both: dict[tuple[int, int], float] = {}
    for (here, there), amount in machines.traffic.items():
        pair = min(here, there), max(here, there)
        both[pair] = both.get(pair, 0.0) + amount
    most = max(both.values(), default=0.0)
    for (here, there), amount in sorted(both.items(), key=lambda item: (-item[1], item[0]))[:MOST_LINES]:
        if here != there and amount > 0:
            (x, y), (to_x, to_y) = at_N2[here], at_N2[there]
            share = amount / most
            yield (
                f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" stroke="var(--c1)" '
                f'stroke-width="{0.5 + 1.5 * share:.1f}" stroke-opacity="{0.15 + 0.6 * share:.2f}"/>'
            )


def _machines(machines: Machines, at_N2: Floats, radius: float) -> Iterator[str]:
    for name, role, (x, y) in zip(machines.names, machines.roles, at_N2, strict=True):
        words = "stands by" if role == IDLE else machines.role_names[role]
        colour = "var(--rule)" if role == IDLE else role_colour(role, len(machines.role_names))
        yield (
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="{colour}" stroke="var(--paper)">'
            f"<title>{escape(name)}: {escape(words)}</title></circle>"
        )
        if role != IDLE:
            size = 1.15 * radius
            yield (
                f'<text x="{x:.1f}" y="{y + 0.36 * size:.1f}" text-anchor="middle" font-size="{size:.1f}" '
                f'style="fill:#fff;pointer-events:none">{role}</text>'
            )


def _names(machines: Machines, clusters: Sequence[Sequence[int]], centres_C2: Floats, radii_C: Floats) -> Iterator[str]:
    for cluster, (x, y), radius in zip(clusters, centres_C2, radii_C, strict=True):
        words = escape(shortened(machines.place(cluster)))
        yield f'<text x="{x:.1f}" y="{y + radius + 9:.1f}" text-anchor="middle">{words}</text>'
