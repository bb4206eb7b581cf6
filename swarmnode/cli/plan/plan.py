"""`swarmnode plan`: which device of a network should do what, worked out for a host before anybody lends a machine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnode.cli.options.option import argument, option, path_option
from swarmnode.cli.options.output_file import output_path, write_output
from swarmnode.cli.options.plan_model import ModelOptions, Planned, ShapeOptions, plan_model
from swarmnode.cli.terminal.console import JSON, command, fail, print_json, say
from swarmnode.cli.terminal.effort import Effort

if TYPE_CHECKING:
    from swarmnode.plan.offline.scenario import Scenario


_traffic = partial(option, None, typed=float, min=0.0, max=1e6)


@dataclass(frozen=True)
class TrafficOptions:
    """Traffic of a training that is planned without a model, in 10^9 bytes."""

    activation_gb: float | None = _traffic("What a pipeline sends from one stage to the next, in 10^9 bytes.")
    gradient_gb: float | None = _traffic("Gradients of one stage, in 10^9 bytes.")


@command
def plan(
    *,
    scenario: Path = argument(..., "Network scenario: a JSON file.", typed=Path, metavar="SCENARIO"),
    shape: ShapeOptions,
    traffic: TrafficOptions,
    model: ModelOptions,
    seconds: float = option(
        None,
        "Search no longer than that, and more thoroughly the longer it may last. Without it: about 10 at most.",
        typed=float,
        min=0.1,
        max=86_400,
    ),
    seed: int = option(0, "Of all that is random: the same seed gives the same plan.", min=0),
    report: Path = path_option(
        "Write a page with the network as a map and a matrix, and the plan drawn in.",
        metavar="OUT.html",
        parse=output_path,
    ),
    as_json: bool = JSON,
) -> None:
    """Plan training on a network: lay stages x pipelines on its devices such that a step's traffic takes the least time.

    Costs are those of DT-FM (arXiv 2206.01288): averaging in the slowest stage, and the slowest link of every hop, both ways.

    Example: swarmnode plan network.json --stages 8 --replicas 8 --activation-gb 0.47 --gradient-gb 0.65

    Example: swarmnode plan network.json --model ./llama --report plan.html
    """
    from swarmnode.cli.terminal.tables import show
    from swarmnode.plan.offline.scenario import Scenario

    effort = Effort(seconds, seed, quiet=as_json)
    network = Scenario.load(scenario)
    if model.source and traffic != TrafficOptions():
        fail("--activation-gb and --gradient-gb follow from --model: leave them out", 2)
    planned = plan_model(network, model, shape, effort) if model.source else _plan_grid(network, shape, traffic, effort)
    if report is not None:
        from swarmnode.cli.terminal.plan_page import plan_page

        write_output(report, plan_page(network, planned.shown, planned.held, planned.pipelines))
    if as_json:
        print_json(planned.summary)
        return
    show(planned.shown)
    effort.tell_if_cut()
    if report is not None:
        say(f"Wrote {report}.")


def _plan_grid(network: Scenario, shape: ShapeOptions, traffic: TrafficOptions, effort: Effort) -> Planned:
    """DT-FM's problem: everything is given but who stands where."""
    from swarmnode.cli.terminal.plan_view import grid_summary, grid_table
    from swarmnode.plan.offline.grid import MicrobatchTraffic, Problem
    from swarmnode.plan.offline.grid_search import Search

    stages, replicas = shape.stages, shape.replicas
    activation_gb, gradient_gb = traffic.activation_gb, traffic.gradient_gb
    if stages is None or replicas is None or activation_gb is None or gradient_gb is None:
        fail("give --stages, --replicas, --activation-gb and --gradient-gb, or --model", 2)
    if shape.holders is not None:
        fail("--holders is for plans with --model: here --replicas says it", 2)
    sent = MicrobatchTraffic(activation_gb * 1e9, gradient_gb * 1e9)
    problem = Problem.on(network, stages=stages, replicas=replicas, traffic=sent)
    with effort.progress() as progress:
        search = Search(problem, seed=effort.seed, effort=effort.share, expired=effort.expired, progress=progress)
        grid = search.run()
    held = [(f"stage {number}", members.tolist()) for number, members in enumerate(grid)]
    summary = grid_summary(network, problem, grid, effort.taken_s)
    return Planned(grid_table(network, problem, grid), held, grid.T.tolist(), summary)
