"""How plans are shown: as JSON values and as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:
    from swarmnode.plan.grid import Grid, Problem
    from swarmnode.plan.scenario import Scenario


def grid_summary(network: Scenario, problem: Problem, grid: Grid, seconds: float) -> dict[str, Any]:
    """The plan as a JSON value: costs, and the devices of every pipeline from the first stage to the last."""
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
    """A row per stage: its device in each pipeline, its averaging, and the slowest link of the hop that follows."""
    cost = problem.cost(grid)
    unused = problem.devices - grid.size
    table = Table(
        title=f"{network.name}: {cost.total_s:.3f} s of traffic in a step: {cost.data_parallel_s:.3f} s averaging, "
        f"{cost.pipeline_s:.3f} s along pipelines",
        title_justify="left",
        caption=f"{unused} of {problem.devices} devices are not used." if unused else None,
        caption_justify="left",
    )
    table.add_column("stage", justify="right")
    for pipeline in range(problem.replicas):
        table.add_column(f"pipeline {pipeline}")
    table.add_column("averaging", justify="right")
    table.add_column("to the next stage and back")
    for stage, members in enumerate(grid):
        devices = (device_name(network, device) for device in members)
        averaging_s = problem.stage_averaging_s(members)
        table.add_row(str(stage), *devices, f"{averaging_s:.3f} s", _hop(problem, grid, stage))
    return table


def device_name(network: Scenario, device: int) -> str:
    """A device's number and its region."""
    region = network.regions[device]
    return f"{device} {region}" if region else str(device)


def _hop(problem: Problem, grid: Grid, stage: int) -> str:
    """How long the hop behind a stage takes in a step, and which link holds it up."""
    if stage + 1 == problem.stages:
        return ""
    here, there = grid[stage], grid[stage + 1]
    links_s = problem.hop_s[here, there]
    slowest = int(links_s.argmax())
    return f"{2 * links_s[slowest]:.3f} s ({here[slowest]} to {there[slowest]})"
