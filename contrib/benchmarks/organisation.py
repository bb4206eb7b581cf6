"""What peers that organise themselves reach of a plan, in training: simulated seconds of a step. Prints JSON.

    python contrib/benchmarks/organisation.py SCENARIO.json... [--gb 8 16 32] [--seed 0]

GPT-3 XL's layer 24 times over, 112 microbatches of 4 x 2048 tokens, fp16 across links; V100s where a scenario names no cards, of so
many GB each. Devices are numbered anew at random, so that no order of a file helps. `planned`: the plan's spans and pipelines;
`wired`: its spans, microbatches wired live; `live`: spans, too, are chosen live. Each beside its ratio to `planned`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from swarmnode.compute.memory import TRAINING_BYTES, usable_bytes
from swarmnode.plan.offline.grid import MicrobatchTraffic, Problem
from swarmnode.plan.offline.grid_search import Search
from swarmnode.plan.offline.hosting import DeviceRates, Planner, Workload
from swarmnode.plan.offline.scenario import Scenario
from swarmnode.plan.view import Span
from swarmnode.simulate.environment.devices import device_of
from swarmnode.simulate.environment.model import Model
from swarmnode.simulate.settings import Settings, TrainSettings
from swarmnode.simulate.simulation import Simulation

UNITS, PARAMETERS, HIDDEN = 24, 12 * 2048**2, 2048
TRAIN = TrainSettings(microbatches=112, microbatch=4, sequence=2048, compress="fp16")
MODEL = Model("gpt3-xl", (PARAMETERS,) * UNITS, (PARAMETERS,) * UNITS, (4 * HIDDEN,) * UNITS, HIDDEN)
GRADIENT_BYTES = 4  # of a parameter
ACTIVATION_BYTES = 2 * TRAIN.tokens * HIDDEN  # of a microbatch
STAGES = 8
EFFORT = 0.1  # of the search that plans for unequal cards
STEPS = 2  # at least; all are alike
LOOKS_S = (30.0, 120.0, 480.0, 1920.0, 7680.0)  # simulated, until so many steps are done
GPU = "V100"


def prepared(scenario: Scenario, gb: int, seed: int) -> Scenario:
    """With cards of so much memory, and its devices in another order."""
    order = np.random.default_rng(seed).permutation(scenario.devices)
    pairs = np.ix_(order, order)
    return dataclasses.replace(
        scenario,
        regions=tuple(scenario.regions[device] for device in order),
        delay_s=scenario.delay_s[pairs],
        bandwidth_bps=scenario.bandwidth_bps[pairs],
        gpus=tuple(scenario.gpus[device] or GPU for device in order),
        peak_flops=tuple(scenario.peak_flops[device] for device in order),
        memory_bytes=(gb * 10**9,) * scenario.devices,
        decode_units_per_s=(),
    )


@dataclasses.dataclass(frozen=True)
class Plan:
    """Who holds what, and peers by index, stage after stage, that make a pipeline."""

    spans: Sequence[Span]
    pipelines: Sequence[Sequence[int]]


def planned(scenario: Scenario) -> Plan:
    """Of equal cards DT-FM's grid of 8 stages (`contrib/studies/planned_allocation.py`); else as `swarmnode plan` does it."""
    if len(set(scenario.gpus)) == 1:
        replicas = scenario.devices // STAGES
        traffic = MicrobatchTraffic(
            ACTIVATION_BYTES * TRAIN.microbatches / replicas, GRADIENT_BYTES * PARAMETERS * UNITS / STAGES
        )
        grid = Search(Problem.on(scenario, stages=STAGES, replicas=replicas, traffic=traffic)).run()
        spans = [Span(number * UNITS // STAGES, (number + 1) * UNITS // STAGES) for number in range(STAGES)]
        stages = [(span, members.tolist()) for span, members in zip(spans, grid, strict=True)]
    else:
        hosting = planner(scenario).plan(effort=EFFORT)
        grid, stages = hosting.grid, [(stage.span, list(stage.devices)) for stage in hosting.stages]
    held = {device: span for span, members in stages for device in members}
    return Plan([held.get(device, Span(0, 0)) for device in range(scenario.devices)], grid.T.tolist())


def planner(scenario: Scenario) -> Planner:
    """With the simulator's devices."""
    devices = [device_of(scenario, index, MODEL) for index in range(scenario.devices)]
    rates = DeviceRates(
        tuple(1 / (device.prompt_s(1, TRAIN.tokens) + device.backward_s(1, TRAIN.tokens)) for device in devices),
        tuple(int(usable_bytes(device.memory_bytes)) for device in devices),
    )
    unit_bytes, gradient_bytes = (TRAINING_BYTES * PARAMETERS,) * UNITS, (GRADIENT_BYTES * PARAMETERS,) * UNITS
    workload = Workload(unit_bytes, gradient_bytes, (1.0,) * UNITS, ACTIVATION_BYTES, TRAIN.microbatches)
    return Planner(scenario, rates, workload)


def step_s(
    scenario: Scenario, spans: Sequence[Span] | None = None, pipelines: Sequence[Sequence[int]] = ()
) -> dict[str, float]:
    """Mean seconds of a step, and of it averaging."""
    for seconds in LOOKS_S:
        settings = Settings("train", hours=seconds / 3600, sample_s=seconds, train=TRAIN)
        result = Simulation(scenario, MODEL, settings, spans=spans, pipelines=pipelines).run()
        values = result.measures.values
        if len(values["step, s"]) >= STEPS:
            break
    steps_s = values["step, s"] or [float("inf")]
    return {
        "step_s": round(statistics.mean(steps_s), 3),
        "averaging_s": round(statistics.mean(values["of it agreeing, s"] or [float("inf")]), 3),
        "held_units": round(statistics.mean(peer.span.units for peer in result.world.peers), 2),
    }


def compared(scenario: Scenario) -> dict[str, Any]:
    """Planned, wired, live."""
    plan = planned(scenario)
    results = {
        "planned": step_s(scenario, plan.spans, plan.pipelines),
        "wired": step_s(scenario, plan.spans),
        "live": step_s(scenario),
    }
    for name in ("wired", "live"):
        results[name]["of_planned"] = round(results[name]["step_s"] / results["planned"]["step_s"], 3)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("scenarios", type=Path, nargs="+")
    parser.add_argument("--gb", type=int, nargs="+", default=[8, 16, 32], help="memory of each card")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the devices")
    arguments = parser.parse_args()
    for path in arguments.scenarios:
        for gb in arguments.gb:
            scenario = prepared(Scenario.load(path), gb, arguments.seed)
            print(json.dumps({"scenario": path.stem, "gb": gb, **compared(scenario)}), flush=True)


if __name__ == "__main__":
    main()
