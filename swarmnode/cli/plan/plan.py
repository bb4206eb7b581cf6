"""`swarmnode plan`: which device of a network should do what, worked out for a host before anybody lends a machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from swarmnode.cli.options.output_file import check_output, write_output
from swarmnode.cli.terminal.console import JSON, fail, print_json, reports_errors, say
from swarmnode.cli.terminal.effort import Effort

if TYPE_CHECKING:
    from swarmnode.plan.offline.scenario import Scenario


@reports_errors
def plan(
    scenario: Path = typer.Argument(..., metavar="SCENARIO", help="Network scenario: a JSON file."),
    stages: int = typer.Option(None, "--stages", min=1, help="Parts that the model is cut into.", show_default=False),
    replicas: int = typer.Option(
        None, "--replicas", min=1, help="Pipelines; each has a device in every stage.", show_default=False
    ),
    holders: int = typer.Option(
        None,
        "--holders",
        min=1,
        help="With --model: how many should hold each unit, so that losing one loses nothing, as far as that is worth its time; "
        "1 gives the fastest plan, whatever it risks; default: 2.",
        show_default=False,
    ),
    activation_gb: float = typer.Option(
        None,
        "--activation-gb",
        min=0.0,
        max=1e6,
        help="What a pipeline sends from one stage to the next, in 10^9 bytes.",
        show_default=False,
    ),
    gradient_gb: float = typer.Option(
        None, "--gradient-gb", min=0.0, max=1e6, help="Gradients of one stage, in 10^9 bytes.", show_default=False
    ),
    model: str = typer.Option(
        "",
        "--model",
        metavar="MODEL",
        help="Plan for a model instead: a config.json of transformers or a module's graph.json, or its folder; or what create "
        "--module takes. --stages and --replicas may be left out.",
        show_default=False,
    ),
    batch: int = typer.Option(1, "--batch", min=1, max=1 << 20, help="With --model: samples of a microbatch."),
    sequence: int = typer.Option(
        1024, "--sequence", min=1, max=1 << 24, help="With --model: tokens of a sequence, if it has any."
    ),
    microbatches: int = typer.Option(32, "--microbatches", min=1, max=1 << 20, help="With --model: of a step."),
    dtype: str = typer.Option("bf16", "--dtype", metavar="fp32|bf16|fp16", help="With --model: what is sent."),
    gpu: str = typer.Option("RTX 3090", "--gpu", metavar="NAME", help="With --model: the card of unknown devices."),
    seconds: float = typer.Option(
        None,
        "--seconds",
        min=0.1,
        max=86_400,
        help="Search no longer than that, and more thoroughly the longer it may last. Without it: about 10 at most.",
        show_default=False,
    ),
    seed: int = typer.Option(0, "--seed", min=0, help="Of all that is random: the same seed gives the same plan."),
    report: Path = typer.Option(
        None,
        "--report",
        metavar="OUT.html",
        help="Write a page with the network as a map and a matrix, and the plan drawn in.",
        show_default=False,
    ),
    as_json: bool = JSON,
) -> None:
    """Plan training on a network: lay stages x pipelines on its devices such that a step's traffic takes the least time.

    Costs are those of DT-FM (arXiv 2206.01288): averaging in the slowest stage, and the slowest link of every hop, both ways.

    Example: swarmnode plan network.json --stages 8 --replicas 8 --activation-gb 0.47 --gradient-gb 0.65

    Example: swarmnode plan network.json --model ./llama --report plan.html
    """
    from swarmnode.cli.options.plan_model import ModelOptions, Shape, plan_model
    from swarmnode.plan.offline.scenario import Scenario

    check_output("--report", report)
    effort = Effort(seconds, seed, quiet=as_json)
    network = Scenario.load(scenario)
    if model:
        if activation_gb is not None or gradient_gb is not None:
            fail("--activation-gb and --gradient-gb follow from --model: leave them out", 2)
        options = ModelOptions(model, batch, sequence, microbatches, dtype, gpu)
        plan_model(network, options, Shape(stages, replicas, holders), effort, report, as_json=as_json)
    elif stages is None or replicas is None or activation_gb is None or gradient_gb is None:
        fail("give --stages, --replicas, --activation-gb and --gradient-gb, or --model", 2)
    elif holders is not None:
        fail("--holders is for plans with --model: here --replicas says it", 2)
    else:
        _plan_grid(network, stages, replicas, activation_gb, gradient_gb, effort, report, as_json=as_json)
    if report is not None and not as_json:
        say(f"Wrote {report}.")


def _plan_grid(
    network: Scenario,
    stages: int,
    replicas: int,
    activation_gb: float,
    gradient_gb: float,
    effort: Effort,
    report: Path | None,
    *,
    as_json: bool,
) -> None:
    """DT-FM's problem: everything is given but who stands where."""
    from swarmnode.cli.terminal.plan_view import grid_summary, grid_table
    from swarmnode.cli.terminal.tables import show
    from swarmnode.plan.offline.grid import MicrobatchTraffic, Problem
    from swarmnode.plan.offline.grid_search import Search

    traffic = MicrobatchTraffic(activation_gb * 1e9, gradient_gb * 1e9)
    problem = Problem.on(network, stages=stages, replicas=replicas, traffic=traffic)
    with effort.progress() as progress:
        search = Search(problem, seed=effort.seed, effort=effort.share, expired=effort.expired, progress=progress)
        grid = search.run()
    shown = grid_table(network, problem, grid)
    if report is not None:
        from swarmnode.cli.terminal.plan_page import plan_page

        held = [(f"stage {number}", members.tolist()) for number, members in enumerate(grid)]
        write_output(report, plan_page(network, shown, held, grid.T.tolist()))
    if as_json:
        print_json(grid_summary(network, problem, grid, effort.taken_s))
    else:
        show(shown)
        effort.tell_if_cut()
