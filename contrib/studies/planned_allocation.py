"""DT-FM (arXiv 2206.01288): gain of a planned allocation over random ones, and of each term of its cost. Prints JSON.

    python contrib/studies/planned_allocation.py contrib/scenarios [--random 3] [--microbatches 112]

A layer of GPT-3 XL 24 times over on 64 V100s, sequences of 2048 tokens, 4 at a time, fp16 across links, gradients in float32. Every
allocation of 8 stages x 8 pipelines is simulated, computing, transfers and averaging: `planned` by DT-FM's whole cost,
`averaging alone` and `pipelines alone` by one of its terms, `random` by none (median). `megatron` is the best shape of tensor,
pipeline and data parallelism that does not know the network (`megatron.py`). Its ranks are in the order of the file (regions lie
together there), or shuffled (median). `traffic` is DT-FM's own cost of the same step. `slowdown`: of planned steps, against
the datacenter's planned one, or its Megatron's.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from megatron import Step, best_step_s
from shapes import transformer

from swarmnode.plan.offline.gpus import find_gpu
from swarmnode.plan.offline.grid import Grid, MicrobatchTraffic, Problem
from swarmnode.plan.offline.grid_search import Search
from swarmnode.plan.offline.planner_files import Scenario
from swarmnode.plan.view import Span
from swarmnode.simulate.environment.devices import device_of
from swarmnode.simulate.settings import Settings, TrainSettings
from swarmnode.simulate.simulation import Simulation

DATACENTER = "datacenter"
SCENARIOS = (DATACENTER, "datacenter_spot", "multi_university", "regional_geo", "worldwide_geo")
STAGES = REPLICAS = 8
LAYERS_PER_STAGE = 3
HIDDEN = 2048
MODEL = transformer("gpt3-xl", LAYERS_PER_STAGE * STAGES, HIDDEN)
GRADIENT_BYTES = 4  # of a parameter
GPU = "V100"
LOOKS_S = (15.0, 60.0, 240.0, 960.0, 3840.0)  # simulated, until a step is done


def with_cards(scenario: Scenario) -> Scenario:
    """Return the scenario with DT-FM's V100s, whose memory and speed its file does not say."""
    card = find_gpu(GPU)
    assert card is not None
    count = scenario.devices
    return dataclasses.replace(scenario, gpus=(GPU,) * count, memory_bytes=(card.memory_bytes,) * count)


def training(microbatches: int) -> TrainSettings:
    """Return settings of `microbatches` microbatches a step, over all pipelines."""
    return TrainSettings(microbatches=microbatches, microbatch=4, sequence=2048, compress="fp16")


def traffic(train: TrainSettings) -> MicrobatchTraffic:
    """Return the bytes that a pipeline sends from stage to stage in a step, and those of a stage's gradients."""
    activation_bytes = 2 * train.tokens * HIDDEN * train.microbatches / REPLICAS
    return MicrobatchTraffic(activation_bytes, GRADIENT_BYTES * LAYERS_PER_STAGE * MODEL.parameters[0])


def step_s(scenario: Scenario, grid: Grid, train: TrainSettings) -> float:
    """Return the mean seconds of a training step on this grid [stage, pipeline]. Raises AssertionError if no step ends in
    time."""
    spans = [Span(0, LAYERS_PER_STAGE)] * scenario.devices
    for stage, members in enumerate(grid):
        for device in members:
            spans[device] = Span(LAYERS_PER_STAGE * stage, LAYERS_PER_STAGE * (stage + 1))
    for seconds in LOOKS_S:
        settings = Settings("train", hours=seconds / 3600, train=train)
        result = Simulation(scenario, MODEL, settings, spans=spans, pipelines=grid.T.tolist()).run()
        if steps_s := result.measures.values["step, s"]:
            return statistics.mean(steps_s)
    raise AssertionError(f"no step within {LOOKS_S[-1]} s")


def allocations(scenario: Scenario, train: TrainSettings, orders: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return the seconds of a step by what the grid was planned for, and DT-FM's cost of the planned grid and of random ones."""
    sent = traffic(train)
    terms = {
        "planned": sent,
        "averaging alone": dataclasses.replace(sent, activation_bytes=0.0),
        "pipelines alone": dataclasses.replace(sent, gradient_bytes=0.0),
    }
    grids = {
        name: Search(Problem.on(scenario, stages=STAGES, replicas=REPLICAS, traffic=term)).run()
        for name, term in terms.items()
    }
    others = [np.array(order).reshape(STAGES, REPLICAS) for order in orders]
    problem = Problem.on(scenario, stages=STAGES, replicas=REPLICAS, traffic=sent)
    told: dict[str, Any] = {name: step_s(scenario, grid, train) for name, grid in grids.items()}
    told["random"] = statistics.median(step_s(scenario, grid, train) for grid in others)
    told["traffic planned"] = problem.cost(grids["planned"]).total_s
    told["traffic random"] = statistics.median(problem.cost(grid).total_s for grid in others)
    return told


def megatron(scenario: Scenario, train: TrainSettings, orders: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return the seconds and the shape of a step that is laid out without knowledge of the network."""
    device = device_of(scenario, 0, MODEL)
    step = Step(
        layers=MODEL.units,
        layer_s=device.prompt_s(1, train.tokens) + device.backward_s(1, train.tokens),
        activation_bytes=2 * train.tokens * HIDDEN,
        layer_gradient_bytes=GRADIENT_BYTES * MODEL.parameters[0],
        microbatches=train.microbatches,
    )
    filed_s, shape = best_step_s(scenario, range(scenario.devices), step)
    shuffled_s = statistics.median(best_step_s(scenario, order, step)[0] for order in orders)
    return {"megatron": filed_s, "shape": dataclasses.asdict(shape), "megatron, shuffled": shuffled_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--random", type=int, default=3, help="random allocations")
    parser.add_argument(
        "--microbatches", type=int, default=14 * REPLICAS, help="microbatches of a step, 4 sequences each"
    )
    arguments = parser.parse_args()
    train = training(arguments.microbatches)
    results: dict[str, dict[str, Any]] = {}
    for name in SCENARIOS:
        scenario = with_cards(Scenario.load(arguments.folder / f"dtfm_{name}.json"))
        orders = [
            random.Random(seed).sample(range(scenario.devices), scenario.devices) for seed in range(arguments.random)
        ]
        told = {**allocations(scenario, train, orders), **megatron(scenario, train, orders)}
        told["gain over random"] = told["random"] / told["planned"]
        told["gain over megatron"] = told["megatron"] / told["planned"]
        told["gain over megatron, shuffled"] = told["megatron, shuffled"] / told["planned"]
        results[name] = told
        told["slowdown"] = told["planned"] / results[DATACENTER]["planned"]
        told["slowdown of megatron's"] = told["planned"] / results[DATACENTER]["megatron"]
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
