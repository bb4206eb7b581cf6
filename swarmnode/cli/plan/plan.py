"""Command `swarmnode plan`: plan which device of a network does what, before any machine is lent."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from swarmnode.cli.options.file_options import output_path, write_output
from swarmnode.errors import LocalError, UsageError
from swarmnode.terminal.console import JSON, command, fail, print_json, say
from swarmnode.terminal.option import argument, option, path_option
from swarmnode.terminal.progress import Effort

if TYPE_CHECKING:
    from rich.table import Table

    from swarmnode.plan.offline.hosting import DeviceRates, Hosting, Workload
    from swarmnode.plan.offline.planner_files import Scenario
    from swarmnode.simulate.environment.model import Model

_traffic = partial(option, None, typed=float, min=0.0, max=1e6)
DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def _dtype(text: str, flag: str) -> str:
    if text not in DTYPE_BYTES:
        raise UsageError(f"{flag} {text}: choose one of {', '.join(DTYPE_BYTES)}")
    return text


def card_name(text: str, flag: str) -> str:
    """Return the name of a GPU. Raises UsageError if it is unknown."""
    from swarmnode.plan.offline.gpus import find_gpu, gpus_by_name

    if find_gpu(text) is None:
        raise UsageError(f"{flag} {text}: this GPU is unknown; choose one of {', '.join(gpus_by_name())}")
    return text


@dataclass(frozen=True)
class ModelOptions:
    """Options of planning for a model; `source` is empty without a model."""

    source: str = option(
        "",
        "Plan for this model: a transformers config.json, a module's graph.json, a folder with one, or a module as for "
        "`create --module`. You can leave out --stages and --replicas.",
        "--model",
        metavar="MODEL",
    )
    batch: int = option(1, "With --model: samples per microbatch.", min=1, max=1 << 20)
    sequence: int = option(1024, "With --model: tokens per sequence, if the model has tokens.", min=1, max=1 << 24)
    microbatches: int = option(32, "With --model: microbatches per step.", min=1, max=1 << 20)
    dtype: str = option(
        "bf16", "With --model: number format of the data sent.", metavar="|".join(DTYPE_BYTES), parse=_dtype
    )
    gpu: str = option("RTX 3090", "With --model: assumed GPU of unknown devices.", metavar="NAME", parse=card_name)

    def tokens_for(self, model: Model) -> int:
        """Return the tokens of a microbatch: for a model without tokens, its samples."""
        return self.batch * (self.sequence if model.has_tokens else 1)


@dataclass(frozen=True)
class ShapeOptions:
    """Shape of a plan; the planner chooses a value that is None."""

    stages: int | None = option(None, "Number of parts to cut the model into.", typed=int, min=1)
    replicas: int | None = option(None, "Number of pipelines; each has a device in every stage.", typed=int, min=1)
    holders: int | None = option(
        None,
        "With --model: how many machines should hold each layer, if that is worth its time, so that losing one loses "
        "nothing; 1 gives the fastest plan at any risk; default: 2.",
        typed=int,
        min=1,
    )


class Planned(NamedTuple):
    """Plan as the command shows it: the table, the name and the devices of each stage, the pipelines, and a summary for scripts."""

    shown: Table
    held: list[tuple[str, Sequence[int]]]
    pipelines: list[list[int]]
    summary: dict[str, Any]
    # sentences on what crosses between stages, and on sharing the experts of a mixture's layers
    advice: Sequence[str] = ()


def plan_model(network: Scenario, options: ModelOptions, shape: ShapeOptions, effort: Effort) -> Planned:
    """Plan which device holds which layers. Raises UsageError if the model cannot be read or does not fit."""
    from swarmnode.plan.cost import HOLDERS
    from swarmnode.plan.expert_groups import GroupWork, WorkKind
    from swarmnode.plan.offline.hosting import Planner
    from swarmnode.simulate.environment.model import load_model
    from swarmnode.simulate.environment.peers import compare_expert_groups, experts_on_disks
    from swarmnode.terminal.plan_view import describe_span, hosting_summary, hosting_table

    model = load_model(options.source, options.batch)
    alone = experts_on_disks(network, model)
    told = [f"Machine {one['device']} alone, serving, packed: {one['says']}." for one in alone]
    network = _with_cards(network, options.gpu)
    workload, hardware = _workload(model, options), _hardware(network, model, options)
    holders = shape.holders or HOLDERS
    effort.begin()
    planner = Planner(network, hardware, workload, seed=effort.seed, expired=effort.expired)
    with effort.progress() as progress:
        try:
            hosting = planner.plan(
                stages=shape.stages, replicas=shape.replicas, holders=holders, effort=effort.share, progress=progress
            )
        except LocalError as error:  # a model that is too large to train here may still be served
            raise LocalError(" ".join((f"{error}{'.' if told else ''}", *told))) from error
    summary = hosting_summary(network, model, workload, hosting, holders, effort.elapsed_s)
    summary |= {"experts_on_disk": alone} if alone else {}
    works = (
        GroupWork(WorkKind.TRAINING, options.microbatches, options.tokens_for(model)),
        GroupWork(WorkKind.PROMPTS, 1, options.sequence),
        GroupWork(WorkKind.DECODING, 1),
    )
    groups = compare_expert_groups(network, model, works, DTYPE_BYTES[options.dtype])
    advice = [*(f"Experts: {group}." for group in groups), *told]
    if form := _form(network, model, options, hosting):
        summary = {**summary, "between_stages": form}
        advice.append(f"Between stages: {form} reaches a loss soonest over the slowest line (docs/training.md).")
    return Planned(
        hosting_table(network, model, workload, hosting, holders),
        [(describe_span(model, stage.span), stage.devices) for stage in hosting.stages],
        hosting.grid.T.tolist(),
        {**summary, "expert_groups": [group.summary() for group in groups]} if groups else summary,
        advice,
    )


def _form(network: Scenario, model: Model, options: ModelOptions, hosting: Hosting) -> str:
    """Return the form of values between stages that the slowest line of a plan asks for, as text; empty with one stage, or if the
    model is a graph or has a bottleneck."""
    from swarmnode.plan.compression import choose_form

    hops = [(here, there) for line in hosting.grid.T.tolist() for here, there in pairwise(line) if here != there]
    if not hops or model.wide or not model.has_tokens:
        return ""
    line_bps = min(float(network.bandwidth_bps[one]) for hop in hops for one in (hop, hop[::-1]))
    tokens_per_s = options.tokens_for(model) / max(stage.compute_s for stage in hosting.stages)
    return choose_form(line_bps, tokens_per_s, model.hidden).describe(model.hidden)


def _with_cards(network: Scenario, gpu: str) -> Scenario:
    """Return the scenario with `gpu` as the card of each device that has neither a card nor a speed."""
    unknown = (None,) * network.devices
    speeds = network.decode_units_per_s or unknown, network.training_units_per_s or unknown
    told = zip(network.gpus, network.peak_flops, *speeds, strict=True)
    return dataclasses.replace(network, gpus=tuple(card or (None if any(rest) else gpu) for card, *rest in told))


def _workload(model: Model, options: ModelOptions) -> Workload:
    from swarmnode.plan.offline.hosting import Workload
    from swarmnode.plan.view import Span

    width, shape = DTYPE_BYTES[options.dtype], (options.batch, options.sequence)
    return Workload(
        unit_bytes=model.training_sizes.weight_bytes,
        gradient_bytes=tuple(count * width for count in model.parameters),
        work=tuple(model.layers(Span(unit, unit + 1)) for unit in range(model.units)),
        boundary_bytes=tuple(width * math.prod(model.crossing(unit, *shape)) for unit in range(model.units)),
        microbatches=options.microbatches,
    )


def _hardware(network: Scenario, model: Model, options: ModelOptions) -> DeviceRates:
    """Return each device's layers per second, forward and back, and the bytes of its memory that units may take."""
    from swarmnode.compute.capacity.capacity import usable_bytes
    from swarmnode.plan.offline.hosting import DeviceRates
    from swarmnode.simulate.environment.peers import BACKWARD, device_of

    tokens = options.tokens_for(model)
    devices = [device_of(network, index, model) for index in range(network.devices)]
    return DeviceRates(
        work_per_s=tuple(1 / ((1 + BACKWARD) * device.prompt_layer_s(tokens)) for device in devices),
        room_bytes=tuple(usable_bytes(device.memory_bytes) for device in devices),
    )


@dataclass(frozen=True)
class TrafficOptions:
    """Traffic of a training that is planned without a model, in 10^9 bytes."""

    activation_gb: float | None = _traffic("Data that a pipeline sends from stage to stage, in 10^9 bytes.")
    gradient_gb: float | None = _traffic("Gradients of one stage, in 10^9 bytes.")


@command
def plan(
    *,
    scenario: Path = argument(..., "JSON file that describes the network.", typed=Path, metavar="SCENARIO"),
    shape: ShapeOptions,
    traffic: TrafficOptions,
    model: ModelOptions,
    seconds: float = option(
        None,
        "Search at most this long; a longer search finds better plans; default: about 10 at most.",
        typed=float,
        min=0.1,
        max=86_400,
    ),
    seed: int = option(0, "Seed of the search; the same seed gives the same plan.", min=0),
    report: Path = path_option(
        "Write a page with the plan drawn into a map and a matrix of the network.",
        metavar="OUT.html",
        parse=output_path,
    ),
    as_json: bool = JSON,
) -> None:
    """Plan training on a network.

    It places stages x pipelines on the devices so that the traffic of a step takes the least time. Costs are those of DT-FM (arXiv
    2206.01288): averaging in the slowest stage, and the slowest link of every hop, both ways.

    Example: swarmnode plan network.json --stages 8 --replicas 8 --activation-gb 0.47 --gradient-gb 0.65

    Example: swarmnode plan network.json --model ./llama --report plan.html
    """
    from swarmnode.plan.offline.planner_files import Scenario
    from swarmnode.terminal.tables import show

    effort = Effort(seconds, seed, quiet=as_json)
    network = Scenario.load(scenario)
    if model.source and traffic != TrafficOptions():
        fail("--activation-gb and --gradient-gb follow from --model: leave them out", 2)
    planned = plan_model(network, model, shape, effort) if model.source else _plan_grid(network, shape, traffic, effort)
    if report is not None:
        from swarmnode.terminal.plan_view import plan_page

        write_output(report, plan_page(network, planned.shown, planned.held, planned.pipelines))
    if as_json:
        print_json(planned.summary)
        return
    show(planned.shown)
    for sentence in planned.advice:
        say(sentence)
    effort.tell_if_cut()
    if report is not None:
        say(f"Wrote {report}.")


def _plan_grid(network: Scenario, shape: ShapeOptions, traffic: TrafficOptions, effort: Effort) -> Planned:
    """Plan which device takes which place for a given shape and traffic (DT-FM's problem). Ends the command if an option is
    missing."""
    from swarmnode.plan.offline.grid import MicrobatchTraffic, Problem
    from swarmnode.plan.offline.grid_search import Search
    from swarmnode.terminal.plan_view import grid_summary, grid_table

    stages, replicas = shape.stages, shape.replicas
    activation_gb, gradient_gb = traffic.activation_gb, traffic.gradient_gb
    if stages is None or replicas is None or activation_gb is None or gradient_gb is None:
        fail("give --stages, --replicas, --activation-gb and --gradient-gb, or --model", 2)
    if shape.holders is not None:
        fail("--holders needs --model; without a model, --replicas has this role", 2)
    sent = MicrobatchTraffic(activation_gb * 1e9, gradient_gb * 1e9)
    problem = Problem.on(network, stages=stages, replicas=replicas, traffic=sent)
    with effort.progress() as progress:
        search = Search(problem, seed=effort.seed, effort=effort.share, expired=effort.expired, progress=progress)
        grid = search.run()
    held = [(f"stage {number}", members.tolist()) for number, members in enumerate(grid)]
    summary = grid_summary(network, problem, grid, effort.elapsed_s)
    return Planned(grid_table(network, problem, grid), held, grid.T.tolist(), summary)
