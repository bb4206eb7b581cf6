"""A plan as a page: its table, and the network with the plan drawn in."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from swarmnode.counting import counted
from swarmnode.simulate.results.machines import planned_machines
from swarmnode.simulate.results.network_map import network_map
from swarmnode.simulate.results.network_matrix import network_matrix
from swarmnode.simulate.results.page import page, table
from swarmnode.simulate.results.plots import legend

if TYPE_CHECKING:
    from rich.table import Table

    from swarmnode.plan.offline.scenario import Scenario


Stages = Sequence[tuple[str, Sequence[int]]]


def plan_page(network: Scenario, shown: Table, stages: Stages, pipelines: Sequence[Sequence[int]]) -> str:
    """As HTML. `shown` is the table that a terminal has; `stages`: what each holds, and its devices."""
    names, members = [name for name, _ in stages], [devices for _, devices in stages]
    machines = planned_machines(network, members, names, pipelines).shown()
    carried = "what a pipeline hands on"
    columns = [[str(column.header).replace("\n", " "), *map(str, column.cells)] for column in shown.columns]
    head, *rows = zip(*columns, strict=True)
    numbers = [number for number, column in enumerate(shown.columns) if column.justify == "right"]
    sections = [
        table(head, rows, numbers=numbers),
        f"<p>{escape(str(shown.caption or ''))}</p>",
        "<h2>The network, with the plan drawn in</h2>",
        network_map(machines, carried),
        network_matrix(machines, carried),
        legend("Stages", [(name, counted(len(devices), "machine")) for name, devices in stages]),
    ]
    return page(str(shown.title), sections)
