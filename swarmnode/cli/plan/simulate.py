"""Command `swarmnode plan simulate`: simulate a swarm on a network, before any machine is lent."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from swarmnode.cli.options.file_options import output_path, write_output
from swarmnode.cli.plan.plan import card_name
from swarmnode.terminal.console import JSON, command, fail, print_json, say
from swarmnode.terminal.option import argument, of_same_names, option, path_option
from swarmnode.terminal.progress import share_bar
from swarmnode.terminal.training_options import AveragingOptions

if TYPE_CHECKING:
    from rich.table import Table

    from swarmnode.plan.offline.planner_files import Scenario
    from swarmnode.plan.view import Span
    from swarmnode.simulate.environment.peers import Change
    from swarmnode.simulate.simulation import Simulation

WORKLOADS = ("serve", "train")


@dataclass(frozen=True)
class WorldOptions:
    """Options of the model, machines and time of a simulation."""

    model: str = option(
        ...,
        "A transformers config.json, a module's graph.json, a folder with one, a GGUF file, or a module as for `create --module`.",
        metavar="MODEL",
    )
    workload: str = option("serve", "What the swarm does with the model.", choices=WORKLOADS)
    churn: str = option(
        "none",
        "Machines that leave per hour, as 10% or 0.1; or a JSON file with a list of [seconds, device, up|down].",
        metavar="none|RATE|TRACE",
    )
    hours: float = option(0.25, "Hours to simulate.", min=0.001, max=10_000)
    seed: int = option(0, "Seed; the same seed gives the same numbers.")
    peers: int = option(0, "Copy the scenario's devices until there are this many machines.", min=0, max=100_000)
    gpu: str = option("", "GPU of devices for which the scenario names none.", metavar="NAME", parse=card_name)


@dataclass(frozen=True)
class ServeOptions:
    """Options of a swarm that serves. Each is the field of ServeSettings with the same name."""

    arrivals_per_s: float = option(0.0, "New sessions per second; default: half load.", "--arrivals", min=0.0)
    clients: int = option(0, "Instead of --arrivals: clients that generate one text after another.", min=0, max=100_000)
    prompt_tokens: int = option(512, "Tokens per prompt, on average.", "--prompt", min=1)
    new_tokens: int = option(128, "Tokens generated per session, on average.", "--tokens", min=1)


@dataclass(frozen=True)
class TrainOptions:
    """Options of a swarm that trains. Each is the field of TrainSettings with the same name."""

    microbatches: int = option(32, "Microbatches per training step.", min=1, max=2048)
    microbatch: int = option(1, "Samples per training microbatch.", "--batch", min=1, max=1 << 20)
    sequence: int = option(1024, "Tokens per sequence, if the model has tokens.", min=1)
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
    plan: Path = path_option("Start with the plan that `plan --model --json` printed.", metavar="PLAN.json"),
    rebalance: bool = option(
        True, "Let machines move to other layers for more throughput.", "--rebalance/--no-rebalance"
    ),
    report: Path = path_option("Write a page with charts.", metavar="OUT.html", parse=output_path),
    as_json: bool = JSON,
) -> None:
    """Simulate a swarm on a network.

    It shows how fast the swarm would be. Placement, routing and compression decide as real machines do.

    Example: swarmnode plan simulate home.json --model ./llama --churn 10% --hours 1 --report swarm.html
    """
    from swarmnode.plan.expert_groups import GroupWork, WorkKind
    from swarmnode.plan.offline.planner_files import Scenario
    from swarmnode.simulate.environment.peers import compare_expert_groups
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
    works = [
        GroupWork(WorkKind.PROMPTS, max(1, served.clients), served.prompt_tokens),
        GroupWork(WorkKind.DECODING, max(1, served.clients)),
    ]
    if world.workload == "train":
        works = [GroupWork(WorkKind.TRAINING, trained.microbatches, trained.microbatch * trained.sequence)]
    groups = compare_expert_groups(simulation.scenario, simulation.model, works)
    if groups:
        figures["expert_groups"] = [group.summary() for group in groups]
    if as_json:
        print_json(figures)
        return
    from swarmnode.terminal.tables import show

    show(_table(figures))
    for group in groups:
        say(f"Experts, not simulated: {group}.")
    if left_out:
        say(
            f"{len(left_out)} of {figures['peers']} devices are not in the plan: they stand by until one in it is lost."
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
    from swarmnode.simulate.environment.model import load_model
    from swarmnode.simulate.settings import ServeSettings, Settings, SwarmSettings, TrainSettings
    from swarmnode.simulate.simulation import Simulation

    network = dataclasses.replace(scenario, gpus=tuple(known or world.gpu or None for known in scenario.gpus))
    devices = world.peers or network.devices
    churn, trace = _churn(world.churn, devices)
    shape = load_model(world.model, trained.microbatch)
    if world.workload == "serve" and not shape.has_tokens:
        fail(f"--model {world.model}: a module's graph can only be simulated in training: add --workload train", 2)
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
    """Return the span that each device begins with. Ends the command if the swarm does not train. Raises UsageError if the plan
    does not fit."""
    from swarmnode.errors import UsageError
    from swarmnode.plan.offline.planner_files import PlanFile

    if workload != "train":
        fail("--plan works only for training; add --workload train", 2)
    plan = PlanFile.load(path)
    try:
        return plan.spans(devices, units)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def _churn(text: str, devices: int) -> tuple[float, list[Change] | None]:
    """Return the rate of departures per hour and the changes of a trace; the changes are None if `text` is "none" or a rate. Ends
    the command if `text` is neither of these nor a file."""
    if text == "none":
        return 0.0, None
    from swarmnode.simulate.environment.peers import read_trace

    with contextlib.suppress(ValueError):
        rate = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        if not 0 <= rate <= 100:
            fail(f"--churn {text}: give a rate from 0 to 100 departures per machine and hour", 2)
        return rate, None
    if not Path(text).is_file():
        fail(f"--churn {text}: give none, a rate as 10% or 0.1, or the name of a JSON file", 2)
    return 0.0, read_trace(text, devices)


@contextlib.contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[float, float], None]]:
    """Show a bar of simulated time on standard error if it is a terminal; yield the function `progress(done_s, of_s)` that updates
    it."""
    with share_bar("Simulating", quiet=quiet) as tell:
        yield lambda done_s, of_s: tell(done_s / of_s, f"{done_s / 60:.1f} min")


def _table(figures: dict[str, Any]) -> Table:
    """Return the summary as a table, with a row for each figure."""
    from swarmnode.terminal.tables import new_table

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
    """Return a figure in at most eight characters unless it is a million or more; small ones with two significant digits."""
    return f"{value:.2g}" if 0 < abs(value) < 0.01 else f"{value:,.4g}"
