"""`swarmnode simulate`: what a swarm would do on a network, before anybody lends a machine."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from swarmnode.cli.options.files import output_path, write_output
from swarmnode.cli.options.option import argument, of_same_names, option, path_option
from swarmnode.cli.options.training import AveragingOptions
from swarmnode.cli.plan.plan import card_name
from swarmnode.cli.terminal.console import JSON, command, fail, print_json, say
from swarmnode.cli.terminal.progress import share_bar

if TYPE_CHECKING:
    from rich.table import Table

    from swarmnode.plan.offline.scenario import Scenario
    from swarmnode.plan.view import Span
    from swarmnode.simulate.environment.peers import Change
    from swarmnode.simulate.simulation import Simulation

WORKLOADS = ("serve", "train")


@dataclass(frozen=True)
class WorldOptions:
    """Options of the model, machines and time of a simulation."""

    model: str = option(
        ...,
        "A config.json of transformers or a module's graph.json, or its folder; or what create --module takes.",
        metavar="MODEL",
    )
    workload: str = option("serve", "What the swarm does.", choices=WORKLOADS)
    churn: str = option(
        "none",
        "Peers that leave in an hour, as 10% or 0.1; or a JSON list of [seconds, device, up|down].",
        metavar="none|RATE|TRACE",
    )
    hours: float = option(0.25, "How long.", min=0.001, max=10_000)
    seed: int = option(0, "Of all that is random: the same seed gives the same numbers.")
    peers: int = option(0, "Copy the scenario's devices up to so many peers.", min=0, max=100_000)
    gpu: str = option("", "The card of devices that the scenario says nothing of.", metavar="NAME", parse=card_name)


@dataclass(frozen=True)
class ServeOptions:
    """Options of a swarm that serves. Each is the field of ServeSettings of its name."""

    arrivals_per_s: float = option(0.0, "Sessions that come per second; default: half load.", "--arrivals", min=0.0)
    clients: int = option(0, "Instead of arrivals: clients that generate one text after another.", min=0, max=100_000)
    prompt_tokens: int = option(512, "Tokens of a prompt, on average.", "--prompt", min=1)
    new_tokens: int = option(128, "Tokens that a session generates, on average.", "--tokens", min=1)


@dataclass(frozen=True)
class TrainOptions:
    """Options of a swarm that trains. Each is the field of TrainSettings of its name."""

    microbatches: int = option(32, "Of one training step.", min=1, max=2048)
    microbatch: int = option(1, "Samples of a training microbatch.", "--batch", min=1, max=1 << 20)
    sequence: int = option(1024, "Tokens of a sequence, if the model has any.", min=1)
    compress: str = option("auto", "Codec between training stages: auto, none, int8, …")


@command
def simulate(
    *,
    scenario: Path = argument(..., "Network scenario: a JSON file.", typed=Path, metavar="SCENARIO"),
    world: WorldOptions,
    served: ServeOptions,
    trained: TrainOptions,
    averages: Annotated[
        AveragingOptions, "average_every average_codec average_rank average_alternating average_by_line"
    ],
    plan: Path = path_option("Begin from what plan --model --json printed.", metavar="PLAN.json"),
    rebalance: bool = option(True, "Whether peers move for throughput.", "--rebalance/--no-rebalance"),
    report: Path = path_option("Write a page with plots.", metavar="OUT.html", parse=output_path),
    as_json: bool = JSON,
) -> None:
    """Simulate a swarm, and tell how fast it would be: a model whose placement, routing and compression decide as nodes do.

    Example: swarmnode simulate home.json --model ./llama --churn 10% --hours 1 --report swarm.html
    """
    from swarmnode.plan.offline.scenario import Scenario
    from swarmnode.simulate.results.report import report as make_report
    from swarmnode.simulate.results.report import summary

    simulation = _simulation(Scenario.load(scenario), world, served, trained, averages, plan, rebalance=rebalance)
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


def _simulation(
    scenario: Scenario,
    world: WorldOptions,
    served: ServeOptions,
    trained: TrainOptions,
    averages: AveragingOptions,
    plan: Path | None,
    *,
    rebalance: bool,
) -> Simulation:
    """Return a simulation, ready to run. Raises UsageError if the scenario, model and plan do not fit together."""
    from swarmnode.simulate.environment.graph_model import load_model
    from swarmnode.simulate.settings import ServeSettings, Settings, SwarmSettings, TrainSettings
    from swarmnode.simulate.simulation import Simulation

    network = dataclasses.replace(scenario, gpus=tuple(known or world.gpu or None for known in scenario.gpus))
    devices = world.peers or network.devices
    churn, trace = _churn(world.churn, devices)
    shape = load_model(world.model, trained.microbatch)
    if world.workload == "serve" and not shape.has_tokens:
        fail(f"--model {world.model}: a module's graph is simulated in training alone: add --workload train", 2)
    sequence = trained.sequence if shape.has_tokens else 1
    settings = Settings(
        workload=world.workload,
        hours=world.hours,
        seed=world.seed,
        churn=churn,
        serve=of_same_names(ServeSettings, served),
        train=of_same_names(TrainSettings, trained, sequence=sequence, averaging=averages.averaging()),
        swarm=SwarmSettings(rebalance=rebalance),
    )
    spans = None if plan is None else _planned(plan, settings.workload, devices, shape.units)
    return Simulation(network, shape, settings, peers=world.peers, trace=trace, spans=spans)


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
    from swarmnode.simulate.environment.peers import read_trace

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
        table.add_row(name, f"{spread['count']:,}", *(_figure(spread[key]) for key in ("mean", "p50", "p90", "p99")))
    return table


def _figure(value: float) -> str:
    """Return a figure in at most eight characters unless it is a million or more: small ones with two digits that count."""
    return f"{value:.2g}" if 0 < abs(value) < 0.01 else f"{value:,.4g}"
