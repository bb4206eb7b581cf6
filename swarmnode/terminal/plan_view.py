"""Plans as JSON values, tables and pages."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from swarmnode.counting import counted, format_bytes, ranges
from swarmnode.simulate.results.result_page import legend, network_map, network_matrix, page, planned_machines, table
from swarmnode.terminal.tables import new_table

if TYPE_CHECKING:
    from rich.table import Table

    from swarmnode.plan.offline.grid import Grid, Problem
    from swarmnode.plan.offline.hosting import Hosting, Workload
    from swarmnode.plan.offline.planner_files import Scenario
    from swarmnode.plan.view import Span
    from swarmnode.simulate.environment.model import Model

Stages = Sequence[tuple[str, Sequence[int]]]


def plan_page(network: Scenario, shown: Table, stages: Stages, pipelines: Sequence[Sequence[int]]) -> str:
    """Return a plan as an HTML page. `shown` is the table for the terminal; `stages` has each stage's name and devices."""
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


def grid_summary(network: Scenario, problem: Problem, grid: Grid, seconds: float) -> dict[str, Any]:
    """Return the plan as a JSON value: costs, and the devices of every pipeline from the first stage to the last."""
    cost = problem.cost(grid)
    return {
        "scenario": network.name,
        "cost_s": cost.total_s,
        "data_parallel_s": cost.data_parallel_s,
        "pipeline_s": cost.pipeline_s,
        "pipelines": grid.T.tolist(),
        "seconds": round(seconds, 3),
    }


def grid_table(network: Scenario, problem: Problem, grid: Grid) -> Table:
    """Return a table with a row per stage: its device in each pipeline, its averaging, and the slowest link to the next stage."""
    cost = problem.cost(grid)
    pipelines = (f"pipeline\n{number}" for number in range(problem.replicas))
    table = new_table(
        f"{network.name}: {cost.total_s:.3f} s of traffic in a step: {cost.data_parallel_s:.3f} s averaging, "
        f"{cost.pipeline_s:.3f} s along pipelines",
        ("stage", *pipelines, "averaging", "to the next stage and back"),
        numbers=("stage", "averaging"),
        caption=_unused(problem.devices - grid.size, problem.devices),
    )
    for stage, members in enumerate(grid):
        devices = (network.label(device) for device in members)
        averaging_s = problem.stage_averaging_s(members)
        table.add_row(str(stage), *devices, f"{averaging_s:.3f} s", _hop(problem, grid, stage))
    return table


def _hop(problem: Problem, grid: Grid, stage: int) -> str:
    """Return how long the hop after a stage takes in a step, and which link is the slowest; empty for the last stage."""
    if stage + 1 == problem.stages:
        return ""
    here, there = grid[stage], grid[stage + 1]
    links_s = problem.hop_s[here, there]
    slowest = int(links_s.argmax())
    return f"{2 * links_s[slowest]:.3f} s ({here[slowest]} to {there[slowest]})"


def hosting_summary(
    network: Scenario, model: Model, workload: Workload, hosting: Hosting, holders: int, seconds: float
) -> dict[str, Any]:
    """Return the plan as a JSON value: that of `grid_summary`, and the content of each stage. `pipelines` are the full ones;
    further devices are listed only in their stages. `holders` is how many holders each unit should have."""
    return {
        **grid_summary(network, hosting.problem, hosting.grid, seconds),
        "model": model.name,
        "step_s": hosting.step_s,
        "activation_gb": max((workload.boundary_bytes[stage.span.start] for stage in hosting.stages[1:]), default=0)
        / 1e9,
        "stages": [
            {
                "units": list(stage.span),
                "layers": list(model.layer_numbers(stage.span)),
                "devices": list(stage.devices),
                "memory_gb": sum(workload.unit_bytes[stage.span.start : stage.span.end]) / 1e9,
                "gradient_gb": sum(workload.gradient_bytes[stage.span.start : stage.span.end]) / 1e9,
                "compute_s": stage.compute_s,
                "averaging_s": stage.averaging_s,
            }
            for stage in hosting.stages
        ],
        "holders": holders,
        "units_with_fewer": hosting.units_below(holders),
        "unused": sorted(set(range(network.devices)) - hosting.used),
        **({"swarm": network.swarm, "peers": network.peers} if network.swarm else {}),
    }


def hosting_table(network: Scenario, model: Model, workload: Workload, hosting: Hosting, holders: int) -> Table:
    """Return a table with a row per stage: its layers, memory, times and devices. `holders` is how many holders each unit should
    have."""
    count = hosting.units_below(holders)
    thin = f"{count} of {workload.units} layers have fewer than {holders} holders." if count else None
    table = new_table(
        f"{model.name} on {network.name}: {hosting.step_s:.2f} s for a step of {workload.microbatches} microbatches, "
        f"{len(hosting.grid)} stages x {len(hosting.grid[0])} pipelines",
        ("stage", "holds", "memory", "computes", "averages", "to the next and back", "devices"),
        numbers=("stage", "memory", "computes", "averages"),
        caption=" ".join(filter(None, (thin, _unused(network.devices - len(hosting.used), network.devices)))) or None,
    )
    for number, stage in enumerate(hosting.stages):
        # Devices grouped by region and card, as in "0-3 Ohio RTX 3090; 7 Tokyo RTX 3080"
        alike: dict[tuple[str, ...], list[int]] = {}
        for device in stage.devices:
            told = tuple(filter(None, (network.regions[device], network.gpus[device])))
            alike.setdefault(told, []).append(device)
        table.add_row(
            str(number),
            describe_span(model, stage.span),
            format_bytes(sum(workload.unit_bytes[stage.span.start : stage.span.end])),
            f"{stage.compute_s:.3f} s",
            f"{stage.averaging_s:.3f} s",
            _hop(hosting.problem_after(network, workload, number), hosting.grid, number),
            "; ".join(" ".join((",".join(ranges(members)), *told)) for told, members in alike.items()),
        )
    return table


def _unused(count: int, devices: int) -> str | None:
    return f"{count} of {devices} devices are not used." if count else None


def describe_span(model: Model, span: Span) -> str:
    """Return the name of a span, as in "embedding, layers 0-4"; for a module, its units, as in "layers 2-5"."""
    layers = model.layer_numbers(span)
    if not model.has_tokens:
        return f"layers {span.start}-{span.end - 1}" if span.units > 1 else f"layer {span.start}"
    parts = ["embedding"] if span.start == 0 else []
    if layers:
        parts.append(f"layers {layers[0]}-{layers[-1]}" if len(layers) > 1 else f"layer {layers[0]}")
    if span.end == model.units:
        parts.append("head")
    return ", ".join(parts)
