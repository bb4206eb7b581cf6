"""Gain of planning over placing devices at random (DT-FM, arXiv 2206.01288), per scenario. Prints JSON.

    python contrib/benchmarks/plan.py contrib/scenarios [STAGES [SAMPLES]]

`random_s` is the median cost of SAMPLES random allocations, `cost_s` that of the plan, both in seconds of a step; no machine's
speed is measured. `cpu_seconds` is what the search took.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from swarmnode.errors import UsageError
from swarmnode.plan.offline.grid import MicrobatchTraffic, Problem
from swarmnode.plan.offline.grid_search import Search
from swarmnode.plan.offline.planner_files import Scenario

GPT3_XL = MicrobatchTraffic(activation_bytes=0.471249e9, gradient_bytes=0.65e9)  # the paper's: 24 layers, 3 a stage


def main() -> None:
    """Print one object per scenario of a folder; other JSON files in it are passed over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("stages", type=int, nargs="?", default=8)
    parser.add_argument("samples", type=int, nargs="?", default=200)
    options = parser.parse_args()
    for file in sorted(options.folder.glob("*.json")):
        try:
            scenario = Scenario.load(file)
        except UsageError as error:
            print(error, file=sys.stderr)
        else:
            print(json.dumps(compare(scenario, options.stages, options.samples)), flush=True)


def compare(scenario: Scenario, stages: int, samples: int) -> dict[str, Any]:
    """Compare the plan's cost with the median of random allocations, with as many pipelines as the devices allow."""
    replicas = scenario.devices // stages
    problem = Problem.on(scenario, stages=stages, replicas=replicas, traffic=GPT3_XL)
    random = np.random.default_rng(0)
    drawn = (random.permutation(scenario.devices)[: stages * replicas] for _ in range(samples))
    random_s = median(problem.cost(order.reshape(stages, replicas)).total_s for order in drawn)
    begin = time.process_time()
    cost = problem.cost(Search(problem).run())
    return {
        "scenario": scenario.name,
        "stages": stages,
        "replicas": replicas,
        "cost_s": round(cost.total_s, 3),
        "data_parallel_s": round(cost.data_parallel_s, 3),
        "pipeline_s": round(cost.pipeline_s, 3),
        "random_s": round(random_s, 3),
        "random_over_planned": round(random_s / cost.total_s, 2),
        "cpu_seconds": round(time.process_time() - begin, 1),
    }


if __name__ == "__main__":
    main()
