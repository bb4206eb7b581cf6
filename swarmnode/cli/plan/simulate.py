"""`swarmnode simulate`: what a swarm would do on a network, before anybody lends a machine."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from swarmnode.cli.options.averaging import (
    AVERAGE_ALTERNATING,
    AVERAGE_BY_LINE,
    AVERAGE_CODEC,
    AVERAGE_EVERY,
    AVERAGE_RANK,
    parse_averaging,
)
from swarmnode.cli.options.output_file import check_output, write_output
from swarmnode.cli.terminal.bars import share_bar
from swarmnode.cli.terminal.console import JSON, fail, print_json, reports_errors, say

if TYPE_CHECKING:
    from rich.table import Table

    from swarmnode.plan.offline.scenario import Scenario
    from swarmnode.plan.view import Span
    from swarmnode.simulate.environment.churn import Change
    from swarmnode.simulate.settings import Settings
    from swarmnode.simulate.simulation import Simulation

WORKLOADS = ("serve", "train")


@reports_errors
def simulate(
    context: typer.Context,
    scenario: Path = typer.Argument(..., metavar="SCENARIO", help="Network scenario: a JSON file."),
    model: str = typer.Option(
        ...,
        "--model",
        metavar="MODEL",
        help="A config.json of transformers or a module's graph.json, or its folder; or what create --module takes.",
    ),
    workload: str = typer.Option("serve", "--workload", metavar="serve|train", help="What the swarm does."),
    churn: str = typer.Option(
        "none",
        "--churn",
        metavar="none|RATE|TRACE",
        help="Peers that leave in an hour, as 10% or 0.1; or a JSON list of [seconds, device, up|down].",
    ),
    hours: float = typer.Option(0.25, "--hours", min=0.001, max=10_000, help="How long."),
    seed: int = typer.Option(0, "--seed", help="Of all that is random: the same seed gives the same numbers."),
    peers: int = typer.Option(
        0, "--peers", min=0, max=100_000, help="Copy the scenario's devices up to so many peers."
    ),
    gpu: str = typer.Option("", "--gpu", metavar="NAME", help="The card of devices that the scenario says nothing of."),
    arrivals: float = typer.Option(
        0.0, "--arrivals", min=0.0, help="Sessions that come per second; default: half load."
    ),
    clients: int = typer.Option(
        0, "--clients", min=0, max=100_000, help="Instead of arrivals: clients that generate one text after another."
    ),
    prompt: int = typer.Option(512, "--prompt", min=1, help="Tokens of a prompt, on average."),
    tokens: int = typer.Option(128, "--tokens", min=1, help="Tokens that a session generates, on average."),
    microbatches: int = typer.Option(32, "--microbatches", min=1, max=2048, help="Of one training step."),
    batch: int = typer.Option(1, "--batch", min=1, max=1 << 20, help="Samples of a training microbatch."),
    sequence: int = typer.Option(1024, "--sequence", min=1, help="Tokens of a sequence, if the model has any."),
    compress: str = typer.Option("auto", "--compress", help="Codec between training stages: auto, none, int8, …"),
    average_every: int = AVERAGE_EVERY,
    average_codec: str = AVERAGE_CODEC,
    average_rank: int = AVERAGE_RANK,
    average_alternating: bool = AVERAGE_ALTERNATING,
    average_by_line: bool = AVERAGE_BY_LINE,
    plan: Path = typer.Option(
        None, "--plan", metavar="PLAN.json", help="Begin from what plan --model --json printed.", show_default=False
    ),
    rebalance: bool = typer.Option(True, "--rebalance/--no-rebalance", help="Whether peers move for throughput."),
    report: Path = typer.Option(
        None, "--report", metavar="OUT.html", help="Write a page with plots.", show_default=False
    ),
    as_json: bool = JSON,
) -> None:
    """Simulate a swarm, and tell how fast it would be: a model whose placement, routing and compression decide as nodes do.

    Example: swarmnode simulate home.json --model ./llama --churn 10% --hours 1 --report swarm.html
    """
    if workload not in WORKLOADS:
        fail(f"--workload {workload}: it is serve or train", 2)
    check_output("--report", report)
    from swarmnode.simulate.results.report import report as make_report
    from swarmnode.simulate.results.summary import summary

    simulation = _simulation(context.params)
    gc.freeze()  # thousands of peers stay to the end: walking them in every collection took four fifths of the time
    with _progress(quiet=as_json) as progress:
        result = simulation.run(progress)
    if report is not None:
        write_output(report, make_report(result))
    figures = summary(result)
    left_out = simulation.left_out
    if plan is not None:
        figures["standing_by"] = left_out
    if as_json:
        print_json(figures)
        return
    from swarmnode.cli.terminal.tables import show

    show(_table(figures))
    if left_out:
        say(
            f"{len(left_out)} of {figures['peers']} devices are not in the plan: they stand by until somebody of it is lost."
        )
    if report is not None:
        say(f"Wrote {report}.")


def _simulation(options: Mapping[str, Any]) -> Simulation:
    """What is to be simulated, ready to run. Raises UsageError for what is not there or does not fit."""
    from swarmnode.plan.offline.scenario import Scenario
    from swarmnode.simulate.environment.graph_model import load_model
    from swarmnode.simulate.simulation import Simulation

    network = _with_gpu(Scenario.load(options["scenario"]), options["gpu"])
    peers, plan = options["peers"], options["plan"]
    churn, trace = _churn(options["churn"], peers or network.devices)
    shape = load_model(options["model"], options["batch"])
    if options["workload"] == "serve" and not shape.has_tokens:
        fail(f"--model {options['model']}: a module's graph is simulated in training alone: add --workload train", 2)
    settings = _settings(options if shape.has_tokens else {**options, "sequence": 1}, churn)
    spans = None if plan is None else _planned(plan, settings.workload, peers or network.devices, shape.units)
    return Simulation(network, shape, settings, peers=peers, trace=trace, spans=spans)


def _settings(options: Mapping[str, Any], churn: float) -> Settings:
    from swarmnode.simulate.settings import ServeSettings, Settings, SwarmSettings, TrainSettings

    averaging = parse_averaging(
        options["average_every"],
        options["average_codec"],
        options["average_rank"],
        by_line=options["average_by_line"],
        alternating=options["average_alternating"],
    )
    served = (options["arrivals"], options["prompt"], options["tokens"])
    trained = (options["microbatches"], options["batch"], options["sequence"])
    return Settings(
        workload=options["workload"],
        hours=options["hours"],
        seed=options["seed"],
        churn=churn,
        serve=ServeSettings(*served, clients=options["clients"]),
        train=TrainSettings(*trained, compress=options["compress"], averaging=averaging),
        swarm=SwarmSettings(rebalance=options["rebalance"]),
    )


def _with_gpu(network: Scenario, gpu: str) -> Scenario:
    """The scenario, with a card for devices of which nothing is known."""
    if not gpu:
        return network
    from swarmnode.plan.offline.gpus import find_gpu, known_gpus

    if find_gpu(gpu) is None:
        fail(f"--gpu {gpu}: known are {', '.join(known_gpus())}", 2)
    return dataclasses.replace(network, gpus=tuple(known or gpu for known in network.gpus))


def _planned(path: Path, workload: str, devices: int, units: int) -> list[Span]:
    """Who begins with what. Raises UsageError where the plan is for something else."""
    from swarmnode.errors import UsageError
    from swarmnode.plan.offline.plan_file import PlanFile

    if workload != "train":
        fail("--plan: plans are for training; add --workload train", 2)
    plan = PlanFile.load(path)
    try:
        return plan.spans(devices, units)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def _churn(text: str, devices: int) -> tuple[float, list[Change] | None]:
    """A rate per hour, or the changes of a trace."""
    if text == "none":
        return 0.0, None
    from swarmnode.simulate.environment.churn import read_trace

    with contextlib.suppress(ValueError):
        rate = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        if not 0 <= rate <= 100:
            fail(f"--churn {text}: it lies between 0 and 100 (peers that leave in an hour, of each that is there)", 2)
        return rate, None
    if not Path(text).is_file():
        fail(f"--churn {text}: neither none, nor a rate as 10% or 0.1, nor a file", 2)
    return 0.0, read_trace(text, devices)


@contextlib.contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[float, float], None]]:
    """A bar of simulated time on standard error, as `progress(done_s, of_s)`, where somebody watches."""
    with share_bar("Simulating", quiet=quiet) as tell:
        yield lambda done_s, of_s: tell(done_s / of_s, f"{done_s / 60:.1f} min")


def _table(figures: dict[str, Any]) -> Table:
    """The summary, a line for each figure."""
    from swarmnode.cli.terminal.tables import new_table

    numbers = ("total or count", "mean", "p50", "p90", "p99")
    table = new_table(
        f"{figures['workload']} {figures['model']} on {figures['scenario']}: {figures['peers']} peers, "
        f"{figures['seconds'] / 60:.1f} min",
        ("", *numbers),
        numbers=numbers,
    )
    for name in ("tokens", "samples"):
        if f"{name}_per_s" in figures:
            table.add_row(f"{name} per second", f"{figures[f'{name}_per_s']:,.2f}")
    table.add_row("share of time computing", f"{figures['utilisation']:.1%}")
    table.add_row("bytes over links", f"{figures['bytes'] / 1e9:,.2f} GB")
    for name, value in figures["totals"].items():
        table.add_row(name, f"{value:,.0f}")
    for name, spread in figures["latencies"].items():
        table.add_row(name, f"{spread['count']:,}", *(f"{spread[key]:,.4g}" for key in ("mean", "p50", "p90", "p99")))
    return table
