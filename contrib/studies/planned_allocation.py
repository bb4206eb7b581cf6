"""DT-FM (arXiv 2206.01288): what a planned allocation gains over a random one. Prints JSON.

    python contrib/studies/planned_allocation.py FOLDER [--random 3] [--minutes 20]

FOLDER has the five dtfm_*.json. A layer of GPT-3 XL 24 times over, 3 a stage, 8 stages x 8 pipelines of V100s. A pipeline
works on 56 sequences of 2048 tokens a step, 4 at a time: 0.470 GB of fp16 activations across each boundary, and 0.604 GB of
fp32 gradients of a stage (DT-FM: 0.471 and 0.65). Every step is simulated: computing, transfers, averaging. `gain` is the
median step time of random allocations over that of the planned one, `traffic_gain` the same by DT-FM's cost model.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
from pathlib import Path

import numpy as np
from shapes import transformer

from swarmnode.plan.offline.gpus import find_gpu
from swarmnode.plan.offline.grid import Grid, MicrobatchTraffic, Problem
from swarmnode.plan.offline.grid_search import Search
from swarmnode.plan.offline.scenario import Scenario
from swarmnode.plan.view import Span
from swarmnode.simulate.settings import Settings, TrainSettings
from swarmnode.simulate.simulation import Simulation

SCENARIOS = ("datacenter", "datacenter_spot", "multi_university", "regional_geo", "worldwide_geo")
STAGES = REPLICAS = 8
LAYERS_PER_STAGE = 3
GPU = "V100"


def with_cards(scenario: Scenario) -> Scenario:
    """DT-FM's V100s, whose memory and speed the scenarios do not say."""
    card = find_gpu(GPU)
    assert card is not None
    count = scenario.devices
    return dataclasses.replace(scenario, gpus=(GPU,) * count, memory_bytes=(card.memory_bytes,) * count)


def step_s(scenario: Scenario, grid: Grid, minutes: float) -> float:
    """Mean seconds of a training step on this grid [stage, pipeline]."""
    spans = [Span(0, LAYERS_PER_STAGE)] * scenario.devices
    for stage, members in enumerate(grid):
        for device in members:
            spans[device] = Span(LAYERS_PER_STAGE * stage, LAYERS_PER_STAGE * (stage + 1))
    train = TrainSettings(microbatches=14 * REPLICAS, microbatch=4, sequence=2048, compress="fp16")
    model = transformer("gpt3-xl", LAYERS_PER_STAGE * STAGES, 2048)
    settings = Settings("train", hours=minutes / 60, train=train)
    result = Simulation(scenario, model, settings, spans=spans, pipelines=grid.T.tolist()).run()
    return statistics.mean(result.measures.values["step, s"])


def study(scenario: Scenario, randoms: int, minutes: float) -> dict[str, object]:
    """The planned grid against random ones."""
    problem = Problem.on(scenario, stages=STAGES, replicas=REPLICAS, traffic=MicrobatchTraffic(0.471249e9, 0.65e9))
    planned = Search(problem).run()
    others = [np.array(random.Random(seed).sample(range(64), 64)).reshape(8, 8) for seed in range(randoms)]
    planned_s = step_s(scenario, planned, minutes)
    random_s = statistics.median(step_s(scenario, grid, minutes) for grid in others)
    traffic_s = statistics.median(problem.cost(grid).total_s for grid in others)
    return {
        "planned_step_s": planned_s,
        "random_step_s": random_s,
        "gain": random_s / planned_s,
        "traffic_planned_s": problem.cost(planned).total_s,
        "traffic_random_s": traffic_s,
        "traffic_gain": traffic_s / problem.cost(planned).total_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--random", type=int, default=3, help="random allocations")
    parser.add_argument("--minutes", type=float, default=20.0, help="simulated time of each")
    arguments = parser.parse_args()
    results = {
        name: study(
            with_cards(Scenario.load(arguments.folder / f"dtfm_{name}.json")), arguments.random, arguments.minutes
        )
        for name in SCENARIOS
    }
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
