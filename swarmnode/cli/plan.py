"""`swarmnode plan`: which device of a network should do what, worked out for a host before anybody lends a machine."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import typer

from swarmnode.cli.console import JSON, fail, print_json, reports_errors

NOMINAL_S = 10.0  # what the default effort takes at most on a slow core
Progress = Callable[[float, float], None]


@reports_errors
def plan(
    scenario: Path = typer.Argument(..., metavar="SCENARIO", help="Network scenario: a JSON file."),
    stages: int = typer.Option(..., "--stages", min=1, help="Parts that the model is cut into."),
    replicas: int = typer.Option(..., "--replicas", min=1, help="Pipelines; each has a device in every stage."),
    activation_gb: float = typer.Option(
        ...,
        "--activation-gb",
        min=0.0,
        max=1e6,
        help="What a pipeline sends from one stage to the next, in 10^9 bytes.",
    ),
    gradient_gb: float = typer.Option(
        ..., "--gradient-gb", min=0.0, max=1e6, help="Gradients of one stage, in 10^9 bytes."
    ),
    seconds: float = typer.Option(
        None,
        "--seconds",
        min=0.1,
        max=86_400,
        help="Search for so long at most; more than 10 searches more.",
        show_default=False,
    ),
    seed: int = typer.Option(0, "--seed", min=0, help="Of all that is random: the same seed gives the same plan."),
    as_json: bool = JSON,
) -> None:
    """Plan training on a network: lay stages x pipelines on its devices such that a step's traffic takes the least time.

    Costs are those of DT-FM (arXiv 2206.01288): averaging in the slowest stage, and the slowest link of every hop, both ways.

    Example: swarmnode plan network.json --stages 8 --replicas 8 --activation-gb 0.47 --gradient-gb 0.65
    """
    begin_s = time.monotonic()
    for option, value in (("--activation-gb", activation_gb), ("--gradient-gb", gradient_gb), ("--seconds", seconds)):
        if value is not None and not math.isfinite(value):
            fail(f"{option} {value}: it is a finite number", 2)
    from swarmnode.cli.plan_view import grid_summary, grid_table
    from swarmnode.plan.grid import Problem, Traffic
    from swarmnode.plan.grid_search import Search
    from swarmnode.plan.scenario import Scenario

    network = Scenario.load(scenario)
    traffic = Traffic(activation_gb * 1e9, gradient_gb * 1e9)
    problem = Problem.on(network, stages=stages, replicas=replicas, traffic=traffic)
    deadline_s = math.inf if seconds is None else begin_s + seconds
    with searching(quiet=as_json) as progress:
        found = Search(
            problem,
            seed=seed,
            effort=1.0 if seconds is None else seconds / NOMINAL_S,
            expired=lambda: time.monotonic() >= deadline_s,
            progress=progress,
        ).run()
    seconds_taken = time.monotonic() - begin_s
    if as_json:
        print_json(grid_summary(network, problem, found.grid, seconds_taken))
        return
    from rich.console import Console

    Console().print(grid_table(network, problem, found.grid))
    if not found.finished:
        typer.echo(f"The search was ended after {seconds:g} s; with more time, the plan may become another one.")


@contextlib.contextmanager
def searching(*, quiet: bool) -> Iterator[Progress]:
    """A bar on standard error, with the best cost so far, where somebody watches."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda _done, _cost_s: None
        return
    columns = (TextColumn("Planning"), BarColumn(), TextColumn("{task.fields[best]}"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task("", total=1.0, best="")
        yield lambda done, cost_s: bars.update(task, completed=done, best=f"{cost_s:.3f} s")
