"""FusionLLM (arXiv 2410.12707): what clusters by bandwidth and AdaTopK gain on slow links. Prints JSON.

    python contrib/studies/slow_links.py contrib/scenarios/geo48_slow_links.json [--orders 3] [--minutes 10]

GPT-2 XL (48 layers of width 1600, embedding and head; a step of 16 sequences of 1024 tokens) and, where there are no more devices
than it has units, ResNet-101 (traced; a step of 16 x 32 images of 224 x 224), each as one pipeline through all devices, float32
across the links. Baselines, uncompressed: units divided equally, and by equal computing, each with devices in an order that
knows nothing of bandwidth (median of `--orders` draws); the latter also in the order of the file. Against them: clusters of devices
that fast links join, in the order that crosses the least slow ones, units by equal computing (their OP-Fence), with AdaTopK on
the links (largest ratio 100) or without; AdaTopK alone; and this project's own controllers instead of it. Test beds: the
file's, and four that are drawn (seeded) in the ranges that the paper states: 24 or 48 consumer cards, one kind to a cluster, at
least 8, 80 or 500 Mbit/s and at most 1 Gbit/s between clusters, 1 to 10 Gbit/s inside. Only time is simulated, not what a codec
does to the loss: see docs/decisions/compression.md for that.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from shapes import cut, transformer

from swarmnode.plan.offline.scenario import Scenario
from swarmnode.plan.offline.split import StageRoom, split
from swarmnode.plan.view import Span
from swarmnode.simulate.environment.devices import device_of
from swarmnode.simulate.environment.graph_model import GraphModel
from swarmnode.simulate.environment.model import Model
from swarmnode.simulate.settings import Settings, TrainSettings
from swarmnode.simulate.simulation import Simulation

FAST_BPS = 1e9  # links that make a cluster
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
    """What is trained."""

    model: Model
    train: TrainSettings


GPT2_XL = Task(transformer("gpt2-xl", 48, 1600, vocabulary=50257), TrainSettings(microbatches=16, sequence=1024))


def resnet101() -> Task:
    """As it is traced: a minute of one core."""
    import torch
    from transformers import ResNetConfig, ResNetForImageClassification

    from swarmnode.compute.graph.exporting.export import export_module
    from swarmnode.compute.graph.partition import partition

    module = ResNetForImageClassification(ResNetConfig(depths=[3, 4, 23, 3])).train()
    example = {"pixel_values": torch.zeros(2, 3, 224, 224), "labels": torch.zeros(2, dtype=torch.int64)}
    graph = partition(export_module(module, example).graph).graph
    train = TrainSettings(microbatches=16, microbatch=32, sequence=1)
    return Task(GraphModel.of_graph(graph, "resnet-101", train.microbatch), train)


def testbed(seed: int, clusters: int, members: int, least_bps: float) -> Scenario:
    """Clusters of equal cards; between two of them, or inside one, all links are alike."""
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
    """Devices that fast links join."""
    found: list[list[int]] = []
    for device in range(scenario.devices):
        home = next((c for c in found if scenario.bandwidth_bps[c[0], device] >= FAST_BPS), None)
        if home is None:
            found.append([device])
        else:
            home.append(device)
    return found


def clustered_order(scenario: Scenario) -> list[int]:
    """Cluster after cluster, in the order whose slow links take the least time together."""
    groups = clusters(scenario)

    def crossing_s(order: Sequence[int]) -> float:
        pairs = itertools.pairwise(order)
        return sum(1 / scenario.bandwidth_bps[groups[one][0], groups[other][0]] for one, other in pairs)

    best = min(itertools.permutations(range(len(groups))), key=crossing_s)
    return [device for group in best for device in groups[group]]


def equal_computing(scenario: Scenario, task: Task, order: Sequence[int]) -> list[Span]:
    """Units such that the slowest device is as fast as can be."""
    model = task.model
    work = [model.layers(Span(unit, unit + 1)) for unit in range(model.units)]
    rooms = [
        StageRoom(1 / device_of(scenario, device, model).prompt_s(1, task.train.tokens), np.inf) for device in order
    ]
    spans = split(work, [0] * model.units, rooms)
    assert spans is not None
    return spans


def step_s(
    scenario: Scenario, task: Task, order: Sequence[int], spans: Sequence[Span], compress: str, minutes: float
) -> float:
    """Mean seconds of a step after the first, in which controllers find their rungs."""
    span_of = dict(zip(order, spans, strict=True))
    placed = [span_of[device] for device in range(scenario.devices)]
    train = dataclasses.replace(task.train, compress=compress)
    steps_s: list[float] = []
    while len(steps_s) < 2:
        settings = Settings("train", hours=minutes / 60, sample_s=60 * minutes, train=train)
        result = Simulation(scenario, task.model, settings, spans=placed, pipelines=[list(order)]).run()
        steps_s = result.measures.values["step, s"]
        minutes *= 4
    return statistics.mean(steps_s[1:])


def study(scenario: Scenario, task: Task, orders: int, minutes: float) -> dict[str, Any]:
    """All ways through one test bed, and what the paper's two ideas gain."""
    filed = list(range(scenario.devices))
    drawn = [random.Random(seed).sample(filed, len(filed)) for seed in range(orders)]
    fenced = clustered_order(scenario)
    equal = cut([1.0] * len(filed), task.model.units)

    def by_computing_s(order: Sequence[int], compress: str) -> float:
        return step_s(scenario, task, order, equal_computing(scenario, task, order), compress, minutes)

    steps = {
        "equal units, any order": statistics.median(
            step_s(scenario, task, order, equal, "none", minutes) for order in drawn
        ),
        "equal computing, any order": statistics.median(by_computing_s(order, "none") for order in drawn),
        "equal computing, any order, adatopk": statistics.median(by_computing_s(order, "adatopk") for order in drawn),
        "equal computing, file order": by_computing_s(filed, "none"),
        "clustered": by_computing_s(fenced, "none"),
        "clustered, adatopk": by_computing_s(fenced, "adatopk"),
        "clustered, auto": by_computing_s(fenced, "auto"),
    }
    baselines = ("equal computing, any order", "equal computing, file order")
    gains = {f"over {base}": steps[base] / steps["clustered, adatopk"] for base in baselines}
    return {"step_s": steps, "gain of clusters and adatopk": gains}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("scenario", type=Path)
    parser.add_argument("--orders", type=int, default=3)
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="simulated time of each; more where no two steps fit"
    )
    arguments = parser.parse_args()
    beds = [Scenario.load(arguments.scenario), *(testbed(seed, *shape) for seed, shape in enumerate(TESTBEDS))]
    tasks = (GPT2_XL, resnet101())
    results = {
        f"{task.model.name} on {bed.name}": study(bed, task, arguments.orders, arguments.minutes)
        for task in tasks
        for bed in beds
        if bed.devices <= task.model.units
    }
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
