"""A network as a matrix: machines in the order of their clusters, bandwidths from each to each, and what goes between them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

import numpy as np

from swarmnode.simulate.results.machines import IDLE, Machines
from swarmnode.simulate.results.plots import WIDTH, figure, role_colour, shortened

LEFT, TOP, ROLE_WIDTH = 150, 10, 26
SIDE = WIDTH - LEFT - ROLE_WIDTH - 14
SHADES = 8
MOST_CELL = 40
LEAST_LABEL = 10.0  # height of a line that can be read


def network_matrix(machines: Machines, carried: str) -> str:
    """From [row] to [column]: the stronger the colour, the more bandwidth (by orders of magnitude); dots where machines send to one
    another what `carried` calls, the larger, the more. Clusters are framed; a bar beside each row tells its role."""
    count = len(machines.names)
    cell = min(MOST_CELL, max(1, SIDE // max(1, count)))  # whole, or there are gaps between neighbours
    least_bps, most_bps = _ends(machines)
    inside = [
        *_cells(machines, cell, least_bps, most_bps),
        *_dots(machines, cell),
        *_clusters(machines, cell),
        *_rows(machines, cell),
    ]
    ends = f"{rate(least_bps)} to {rate(most_bps)} where the colour is strongest"
    title = f"Bandwidth from each machine (row) to each (column), from {ends}; dots: {carried}"
    return figure(title, "".join(inside), TOP + cell * count + 8)


def rate(bps: float) -> str:
    """As in "8 Mbit/s"."""
    unit, size = ("Gbit/s", 1e9) if bps >= 1e9 else ("Mbit/s", 1e6) if bps >= 1e6 else ("kbit/s", 1e3)
    return f"{bps / size:.3g} {unit}"


def _ends(machines: Machines) -> tuple[float, float]:
    apart = ~np.eye(len(machines.names), dtype=bool) & (machines.bandwidth_bps > 0)
    known = machines.bandwidth_bps[apart]
    return (float(known.min()), float(known.max())) if known.size else (0.0, 0.0)


def _cells(machines: Machines, cell: float, least_bps: float, most_bps: float) -> Iterator[str]:
    """One path for each shade: cells by themselves would make the page ten times as long."""
    decades = math.log(most_bps / least_bps) if most_bps > least_bps else 1.0
    paths: dict[int, list[str]] = {}
    for row, line in enumerate(machines.bandwidth_bps.tolist()):
        for column, bps in enumerate(line):
            if row != column and bps > 0:
                shade = round(SHADES * math.log(bps / least_bps) / decades)
                x, y = _left(column, cell), TOP + cell * row
                paths.setdefault(shade, []).append(f"M{x:.1f} {y:.1f}h{cell:.1f}v{cell:.1f}h-{cell:.1f}z")
    for shade, path in sorted(paths.items()):
        strength = 0.1 + 0.8 * shade / SHADES
        yield f'<path d="{"".join(path)}" fill="var(--c0)" fill-opacity="{strength:.2f}" shape-rendering="crispEdges"/>'


def _dots(machines: Machines, cell: float) -> Iterator[str]:
    most = max(machines.traffic.values(), default=0.0)
    for (here, there), amount in machines.traffic.items():
        if here != there and amount > 0:
            radius = cell * (0.12 + 0.22 * amount / most)
            x, y = _left(there + 0.5, cell), TOP + cell * (here + 0.5)
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="var(--c1)"/>'


def _clusters(machines: Machines, cell: float) -> Iterator[str]:
    """A frame where a cluster meets itself."""
    for cluster in machines.clusters():
        first, side = min(cluster), cell * len(cluster)
        yield (
            f'<rect x="{_left(first, cell):.1f}" y="{TOP + cell * first:.1f}" width="{side:.1f}" height="{side:.1f}" '
            'fill="none" stroke="var(--c1)" stroke-width="1.5"/>'
        )


def _rows(machines: Machines, cell: float) -> Iterator[str]:
    """Roles, and names: of each machine where lines are high enough, else of clusters that are."""
    for row, role in enumerate(machines.roles):
        if role != IDLE:
            y, words = TOP + cell * row, f"{machines.names[row]}: {machines.role_names[role]}"
            yield (
                f'<rect x="{LEFT + 4}" y="{y:.1f}" width="{ROLE_WIDTH - 8}" height="{cell:.1f}" '
                f'fill="{role_colour(role, len(machines.role_names))}"><title>{escape(words)}</title></rect>'
            )
    groups = [[row] for row in range(len(machines.names))] if cell >= LEAST_LABEL else machines.clusters()
    for group in groups:
        if cell * len(group) >= LEAST_LABEL:
            yield _label(machines.place(group), TOP + cell * (min(group) + len(group) / 2))


def _label(text: str, y: float) -> str:
    return f'<text x="{LEFT - 2}" y="{y + 4:.1f}" text-anchor="end">{escape(shortened(text))}</text>'


def _left(column: float, cell: float) -> float:
    return LEFT + ROLE_WIDTH + cell * column
