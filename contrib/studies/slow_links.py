"""FusionLLM (arXiv 2410.12707): gain of clusters by bandwidth and of AdaTopK on slow links. Prints JSON.

    python contrib/studies/slow_links.py contrib/scenarios/geo48_slow_links.json [--models resnet-101] [--beds 1 4] [--orders 3]

GPT-2 XL (48 layers of width 1600, embedding and head; a step of 16 sequences of 1024 tokens) and, if it has at least as many units
as there are devices, ResNet-101 (traced; a step of 16 x 32 images of 224 x 224), each as one pipeline through all devices, float32
across the links. Baselines, uncompressed: units divided equally, and by equal computing, each with devices in an order that
knows nothing of bandwidth (median of `--orders` draws); the latter also in the order of the file. Against them: clusters of devices
with fast links (their OP-Fence), cluster after cluster, in the order and with the cut whose slowest stage or link is fastest.
These run with AdaTopK on the links (largest ratio 100), without it, and with this project's own controllers instead; AdaTopK
also runs alone.
`clusters, equal computing` cuts without a look at what crosses. Test beds: 0 is the file's, 1 to 4 are drawn (seeded) in the
ranges that the paper states: 24 or 48 consumer cards, one kind to a cluster, at least 8, 80 or 500 Mbit/s and at most 1 Gbit/s
between clusters, 1 to 10 Gbit/s inside. Only time is simulated, not what a codec does to the loss: see
docs/decisions/compression.md for that.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from shapes import cut, transformer

from swarmnode.plan.offline.hosting import StageRoom, split
from swarmnode.plan.offline.planner_files import Scenario
from swarmnode.plan.spans.flow import Floats
from swarmnode.plan.view import Span
from swarmnode.simulate.environment.model import GraphModel, Model
from swarmnode.simulate.environment.peers import device_of
from swarmnode.simulate.settings import Settings, TrainSettings
from swarmnode.simulate.simulation import Simulation
from swarmnode.tolerances import LARGEST_RATIO

FAST_BPS = 1e9  # links that make a cluster
FLOAT32_BYTES = 4
CARDS = ("RTX 2080 Ti", "RTX 3060", "RTX 3080", "RTX 3090", "RTX 4090")
TESTBEDS = (
    (3, 8, 8e6),
    (6, 4, 8e7),
    (6, 8, 8e6),
    (3, 8, 5e8),
)  # clusters, devices in each, and the least between them, bits/s
NEAR_S, FAR_S = 2e-4, (0.001, 0.05)  # delays inside clusters, and between them


@dataclasses.dataclass(frozen=True)
class Task:
    """Model and settings of a training."""

    model: Model
    train: TrainSettings


def gpt2_xl() -> Task:
    """Return GPT-2 XL, made from its sizes alone."""
    return Task(transformer("gpt2-xl", 48, 1600, vocabulary=50257), TrainSettings(microbatches=16, sequence=1024))


def resnet101() -> Task:
    """Return ResNet-101 as traced; the tracing takes a minute of one core."""
    import torch
    from transformers import ResNetConfig, ResNetForImageClassification

    from swarmnode.compute.graph.exporting.module_export import export_module
    from swarmnode.compute.graph.partition import partition

    module = ResNetForImageClassification(ResNetConfig(depths=[3, 4, 23, 3])).train()
    example = {"pixel_values": torch.zeros(2, 3, 224, 224), "labels": torch.zeros(2, dtype=torch.int64)}
    graph = partition(export_module(module, example).graph).graph
    train = TrainSettings(microbatches=16, microbatch=32, sequence=1)
    return Task(GraphModel.of_graph(graph, "resnet-101", train.microbatch), train)


TASKS: dict[str, Callable[[], Task]] = {"gpt2-xl": gpt2_xl, "resnet-101": resnet101}


def testbed(seed: int, clusters: int, members: int, least_bps: float) -> Scenario:
    """Return a network of clusters of equal cards. All links inside a cluster, or between two clusters, are alike."""
    chance = random.Random(seed)
    delay_s, bandwidth_bps = np.zeros((clusters, clusters)), np.zeros((clusters, clusters))
    for one, other in itertools.combinations_with_replacement(range(clusters), 2):
        slowest, fastest = (FAST_BPS, 1e10) if one == other else (least_bps, FAST_BPS)
        rate_bps = slowest * (fastest / slowest) ** chance.random()
        bandwidth_bps[one, other] = bandwidth_bps[other, one] = rate_bps
        delay_s[one, other] = delay_s[other, one] = NEAR_S if one == other else chance.uniform(*FAR_S)
    home = np.repeat(np.arange(clusters), members)
    cards = [chance.choice(CARDS) for _ in range(clusters)]
    count = clusters * members
    return Scenario(
        name=f"{clusters} clusters of {members}, {least_bps / 1e6:g} Mbit/s at least",
        regions=tuple(f"cluster {number}" for number in home),
        delay_s=delay_s[np.ix_(home, home)] * (1 - np.eye(count)),
        bandwidth_bps=bandwidth_bps[np.ix_(home, home)],
        gpus=tuple(cards[number] for number in home),
        peak_flops=(None,) * count,
        memory_bytes=(None,) * count,
    )


def clusters(scenario: Scenario) -> list[list[int]]:
    """Return clusters of devices with fast links to the first device of the cluster."""
    found: list[list[int]] = []
    for device in range(scenario.devices):
        home = next((c for c in found if scenario.bandwidth_bps[c[0], device] >= FAST_BPS), None)
        if home is None:
            found.append([device])
        else:
            home.append(device)
    return found


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Devices in order, and what each holds. `slowest_s`: of a microbatch there and back, in the slowest stage or on the slowest
    link."""

    order: list[int]
    spans: list[Span]
    slowest_s: float


def pipeline(scenario: Scenario, task: Task, order: Sequence[int], ratio: float | None = None) -> Pipeline:
    """Cut the units so that the slowest device is as fast as can be. With a `ratio` of compression on links, count the
    slowest link, too."""
    model, tokens = task.model, task.train.tokens
    devices = [device_of(scenario, device, model) for device in order]
    rooms = [StageRoom(1 / (card.prompt_s(1, tokens) + card.backward_s(1, tokens)), np.inf) for card in devices]
    work = [model.layers(Span(unit, unit + 1)) for unit in range(model.units)]
    entering_s = _entering_s(scenario, task, order, ratio or np.inf)
    spans = split(work, [0] * model.units, rooms, entering_s)
    assert spans is not None
    stages_s = (sum(work[span.start : span.end]) / room.work_per_s for span, room in zip(spans, rooms, strict=True))
    links_s = (entering_s(stage)[span.start] for stage, span in enumerate(spans))
    return Pipeline(list(order), spans, max(*stages_s, *links_s))


def _entering_s(scenario: Scenario, task: Task, order: Sequence[int], ratio: float) -> Callable[[int], Floats]:
    """Return a function from a stage to seconds [U] on the link into it, for each unit that it may begin with. Both ways at
    once."""
    model, train = task.model, task.train
    values = [
        max(np.prod(model.crossing(unit, train.microbatch, train.sequence, back=back)) for back in (False, True))
        for unit in range(model.units)
    ]
    bits_U = 8 * FLOAT32_BYTES / ratio * np.array(values, dtype=float)

    def entering_s(stage: int) -> Floats:
        if stage == 0:
            return np.zeros(model.units)
        there, back = order[stage - 1], order[stage]
        return bits_U / min(scenario.bandwidth_bps[there, back], scenario.bandwidth_bps[back, there])

    return entering_s


def clustered(scenario: Scenario, task: Task, ratio: float | None) -> Pipeline:
    """Return the fastest pipeline that goes through cluster after cluster; among equals that with the least time on slow links."""
    groups = clusters(scenario)

    def crossing_s(order: Sequence[int]) -> float:
        pairs = itertools.pairwise(order)
        return sum(1 / scenario.bandwidth_bps[groups[one][0], groups[other][0]] for one, other in pairs)

    orders = sorted(itertools.permutations(range(len(groups))), key=crossing_s)
    if ratio is None:
        orders = orders[:1]
    laid = ([device for group in order for device in groups[group]] for order in orders)
    return min((pipeline(scenario, task, order, ratio) for order in laid), key=lambda found: found.slowest_s)


def step_s(scenario: Scenario, task: Task, laid: Pipeline, compress: str, minutes: float) -> float:
    """Return the mean seconds of a step after the first. Controllers find their rungs in the first step."""
    span_of = dict(zip(laid.order, laid.spans, strict=True))
    placed = [span_of[device] for device in range(scenario.devices)]
    train = dataclasses.replace(task.train, compress=compress)
    steps_s: list[float] = []
    while len(steps_s) < 2:
        settings = Settings("train", hours=minutes / 60, sample_s=60 * minutes, train=train)
        result = Simulation(scenario, task.model, settings, spans=placed, pipelines=[laid.order]).run()
        steps_s = result.measures.values["step, s"]
        minutes *= 4
    return statistics.mean(steps_s[1:])


def study(scenario: Scenario, task: Task, orders: int, minutes: float) -> dict[str, Any]:
    """Return the seconds of a step by every way through one test bed, and the gain of the paper's two ideas."""
    filed = list(range(scenario.devices))
    drawn = [random.Random(seed).sample(filed, len(filed)) for seed in range(orders)]
    equal = [Pipeline(order, cut([1.0] * len(filed), task.model.units), np.nan) for order in drawn]
    by_computing = [pipeline(scenario, task, order) for order in drawn]
    dense, sparse = (clustered(scenario, task, ratio) for ratio in (1.0, LARGEST_RATIO))

    def median_s(pipelines: Sequence[Pipeline], compress: str = "none") -> float:
        return statistics.median(step_s(scenario, task, laid, compress, minutes) for laid in pipelines)

    steps = {
        "equal units, any order": median_s(equal),
        "equal computing, any order": median_s(by_computing),
        "equal computing, any order, adatopk": median_s(by_computing, "adatopk"),
        "equal computing, file order": median_s([pipeline(scenario, task, filed)]),
        "clusters, equal computing, adatopk": median_s([clustered(scenario, task, None)], "adatopk"),
        "clusters": median_s([dense]),
        "clusters, adatopk": median_s([sparse], "adatopk"),
        "clusters, auto": median_s([dense], "auto"),
    }
    baselines = ("equal computing, any order", "equal computing, file order")
    gains = {f"over {base}": steps[base] / steps["clusters, adatopk"] for base in baselines}
    return {"step_s": steps, "gain of clusters and adatopk": gains}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("scenario", type=Path)
    parser.add_argument("--models", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--beds", nargs="+", type=int, choices=range(1 + len(TESTBEDS)), help="only these")
    parser.add_argument("--orders", type=int, default=3)
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="simulated time of each; more where no two steps fit"
    )
    arguments = parser.parse_args()
    beds = [Scenario.load(arguments.scenario), *(testbed(seed, *shape) for seed, shape in enumerate(TESTBEDS))]
    chosen = beds if arguments.beds is None else [beds[bed] for bed in arguments.beds]
    results = {
        f"{task.model.name} on {bed.name}": study(bed, task, arguments.orders, arguments.minutes)
        for task in (TASKS[name]() for name in arguments.models)
        for bed in chosen
        if bed.devices <= task.model.units
    }
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
