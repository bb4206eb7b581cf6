"""Training steps of peers that organise themselves, against planned ones: simulated seconds of a step. Prints JSON.

    python contrib/benchmarks/organisation.py SCENARIO.json|N|NAME... [--gb 8 16 32] [--cards CARD...] [--seed 0] [--lose 0.3]

GPT-3 XL's layer 24 times over, 112 microbatches of 4 x 2048 tokens, fp16 across links; V100s where a scenario names no cards, of
`--gb` each; with --cards these in turn, with their own memory. For a number N a network is drawn; others go by
name (`MADE_UP`). Devices are numbered anew at random, so that no order of a file
helps. `planned`: the plan's spans and pipelines, with two holders of each unit where these are worth it, as live peers weigh it;
`wired`: its spans, microbatches wired live, which is what `plan simulate --plan` does; `live`: spans, too, are chosen live.
Each beside its ratio to `planned`, `live` beside that to `wired`, and `wired` beside that to the plan's own estimate.
`fastest`, if that is another plan: what `swarmnode plan --holders 1` says, wired live, beside what `live` is of it. With
--lose, that share of the devices vanishes after the first step: `live` is a step of the others, beside new plans for them.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from swarmnode.compute.capacity.capacity import TRAINING_BYTES, usable_bytes
from swarmnode.plan.cost import HOLDERS
from swarmnode.plan.offline.grid import MicrobatchTraffic, Problem
from swarmnode.plan.offline.grid_search import Search
from swarmnode.plan.offline.hosting import DeviceRates, Planner, Workload
from swarmnode.plan.offline.planner_files import Scenario
from swarmnode.plan.spans.flow import Floats, Indexes
from swarmnode.plan.view import Span
from swarmnode.simulate.environment.devices import device_of
from swarmnode.simulate.environment.model import Model
from swarmnode.simulate.environment.peers import Change
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
LOST_S = 30.0  # simulated: when devices vanish
AFTER_S = 1800.0  # and how long the others have to find their places again
LOOKS_S = (30.0, 120.0, 480.0, 1920.0, 7680.0)  # simulated, tried in turn until `STEPS` steps are done
GPU = "V100"


def prepared(scenario: Scenario, gb: int, seed: int) -> Scenario:
    """Return the scenario with `gb` GB on each card, `GPU` where it names no card, and its devices in random order."""
    cards = tuple(
        gpu or (GPU if flops is None else None) for gpu, flops in zip(scenario.gpus, scenario.peak_flops, strict=True)
    )
    equal = dataclasses.replace(scenario, gpus=cards, memory_bytes=(gb * 10**9,) * scenario.devices)
    return some(equal, np.random.default_rng(seed).permutation(scenario.devices))


def with_cards(scenario: Scenario, cards: Sequence[str], seed: int) -> Scenario:
    """Return the scenario with these cards in turn, and its devices in random order."""
    gpus = tuple(itertools.islice(itertools.cycle(cards), scenario.devices))
    unequal = dataclasses.replace(
        scenario, gpus=gpus, memory_bytes=(None,) * scenario.devices, peak_flops=(None,) * scenario.devices
    )
    return some(unequal, np.random.default_rng(seed).permutation(scenario.devices))


def drawn(seed: int) -> Scenario:
    """Draw a network of places with several devices each: fast inside a place, and of random speed between two places."""
    chance = np.random.default_rng(seed)
    places, devices = int(chance.integers(2, 8)), int(chance.integers(24, 65))
    place_N = np.sort(chance.integers(places, size=devices))
    where_P2 = chance.random((places, 2))
    apart_s_PP = 0.06 * np.hypot(*(where_P2[:, None] - where_P2[None]).transpose(2, 0, 1))
    between_PP = 10 ** chance.uniform(7.7, 9.3, (places, places))
    bandwidth_PP = np.minimum(between_PP, between_PP.T)
    np.fill_diagonal(bandwidth_PP, 10 ** chance.uniform(9, 10, places))
    pairs = np.ix_(place_N, place_N)
    return Scenario(
        f"drawn-{seed}",
        tuple(f"place {place}" for place in place_N),
        apart_s_PP[pairs] + 0.0005 * (1 - np.eye(devices)),
        bandwidth_PP[pairs],
        (None,) * devices,
        (None,) * devices,
        (None,) * devices,
    )


def places(
    name: str, sizes: Sequence[int], delay_s: Sequence[float], bandwidth_bps: Sequence[float], flops: Floats
) -> Scenario:
    """Return places in a row with `sizes` devices each. `delay_s` and `bandwidth_bps` are indexed by the distance between
    two places; the last value holds for larger distances."""
    place_N = np.repeat(np.arange(len(sizes)), sizes)
    apart_NN = abs(place_N[:, None] - place_N).clip(max=len(delay_s) - 1)
    devices, delay_NN = len(place_N), np.array(delay_s)[apart_NN] * (1 - np.eye(len(place_N)))
    regions, nothing = tuple(f"place {place}" for place in place_N), (None,) * devices
    return Scenario(name, regions, delay_NN, np.array(bandwidth_bps)[apart_NN], nothing, tuple(flops.tolist()), nothing)


def slow_member() -> Scenario:
    """Return a network of two places of twelve devices; one device has a tenth of the others' speed."""
    flops = np.full(24, 6e13)
    flops[-1] /= 10
    return places("slow_member", [12, 12], [0.001, 0.02], [5e9, 5e8], flops)


def chain() -> Scenario:
    """Return a network of three places in a row, with the least bandwidth from the first to the last."""
    return places("chain", [12, 12, 12], [0.0005, 0.015, 0.03], [5e9, 1e9, 2.5e8], np.full(36, 6e13))


def asymmetric() -> Scenario:
    """Return a network of homes with two to ten times as much bandwidth down as up."""
    chance = np.random.default_rng(1)
    up_bps = 10 ** chance.uniform(8.3, 9.3, 32)
    homes = places("asymmetric", [1] * 32, [0.0, 0.01], [0.0, 0.0], np.full(32, 6e13))
    down_bps = up_bps * chance.uniform(2, 10, 32)
    return dataclasses.replace(homes, bandwidth_bps=np.minimum(up_bps[:, None], down_bps))


def few_fast() -> Scenario:
    """Return a network of four places of ten devices; one device of twenty has ten times the others' speed."""
    flops = np.full(40, 2e13)
    flops[:2] *= 10
    return places("few_fast", [10] * 4, [0.0005, 0.02], [2e9, 6e8], flops)


MADE_UP = {made.__name__: made for made in (slow_member, chain, asymmetric, few_fast)}


def some(scenario: Scenario, order: Indexes) -> Scenario:
    """Return the scenario of only these devices, in this order."""
    pairs = np.ix_(order, order)
    return dataclasses.replace(
        scenario,
        regions=tuple(scenario.regions[device] for device in order),
        delay_s=scenario.delay_s[pairs],
        bandwidth_bps=scenario.bandwidth_bps[pairs],
        gpus=tuple(scenario.gpus[device] for device in order),
        peak_flops=tuple(scenario.peak_flops[device] for device in order),
        memory_bytes=tuple(scenario.memory_bytes[device] for device in order),
        decode_units_per_s=(),
        training_units_per_s=(),
        peers=(),
    )


@dataclasses.dataclass(frozen=True)
class Plan:
    """Spans of the devices by index, and pipelines as device indices, stage after stage. `step_s` is the planner's
    estimate, 0 if it made none."""

    spans: Sequence[Span]
    pipelines: Sequence[Sequence[int]]
    step_s: float = 0.0


def planned(scenario: Scenario, holders: int = HOLDERS) -> Plan:
    """Plan spans and pipelines. Equal cards that `STAGES` divides get DT-FM's grid of 8 stages
    (`contrib/studies/planned_allocation.py`). Other cards, and all with `holders` of 1, get the plan of `swarmnode plan`."""
    equal = len({*zip(scenario.gpus, scenario.peak_flops, strict=True)}) == 1
    if holders > 1 and equal and scenario.devices % STAGES == 0:
        replicas = scenario.devices // STAGES
        traffic = MicrobatchTraffic(
            ACTIVATION_BYTES * TRAIN.microbatches / replicas, GRADIENT_BYTES * PARAMETERS * UNITS / STAGES
        )
        grid = Search(Problem.on(scenario, stages=STAGES, replicas=replicas, traffic=traffic)).run()
        spans = [Span(number * UNITS // STAGES, (number + 1) * UNITS // STAGES) for number in range(STAGES)]
        stages, said_s = [(span, members.tolist()) for span, members in zip(spans, grid, strict=True)], 0.0
    else:
        hosting = planner(scenario).plan(holders=holders, effort=EFFORT)
        grid, said_s = hosting.grid, float(hosting.step_s)
        stages = [(stage.span, list(stage.devices)) for stage in hosting.stages]
    held = {device: span for span, members in stages for device in members}
    return Plan([held.get(device, Span(0, 0)) for device in range(scenario.devices)], grid.T.tolist(), said_s)


def planner(scenario: Scenario) -> Planner:
    """Return a planner with the simulator's devices."""
    devices = [device_of(scenario, index, MODEL) for index in range(scenario.devices)]
    rates = DeviceRates(
        tuple(1 / (device.prompt_s(1, TRAIN.tokens) + device.backward_s(1, TRAIN.tokens)) for device in devices),
        tuple(int(usable_bytes(device.memory_bytes)) for device in devices),
    )
    unit_bytes, gradient_bytes = (TRAINING_BYTES * PARAMETERS,) * UNITS, (GRADIENT_BYTES * PARAMETERS,) * UNITS
    workload = Workload(unit_bytes, gradient_bytes, (1.0,) * UNITS, (ACTIVATION_BYTES,) * UNITS, TRAIN.microbatches)
    return Planner(scenario, rates, workload)


def step_s(
    scenario: Scenario,
    spans: Sequence[Span] | None = None,
    pipelines: Sequence[Sequence[int]] = (),
    *,
    trace: Sequence[Change] | None = None,
    since_s: float = 0.0,
) -> dict[str, float]:
    """Return mean seconds of a step and of its averaging; infinity without steps. With a `trace`, only the latest steps after
    `since_s` count."""
    for seconds in LOOKS_S if not trace else (AFTER_S,):
        settings = Settings("train", hours=(since_s + seconds) / 3600, sample_s=seconds, train=TRAIN)
        result = Simulation(scenario, MODEL, settings, spans=spans, pipelines=pipelines, trace=trace).run()
        values = result.measures.values
        if len(values["step, s"]) >= STEPS:
            break
    began_s = np.concatenate([[0.0], np.cumsum(values["step, s"])])
    first = max(int((began_s < since_s).sum()), len(values["step, s"]) - STEPS) if trace else 0
    steps_s, averaging_s = (values[name][first:] for name in ("step, s", "of it agreeing, s"))
    return {
        "step_s": round(statistics.mean(steps_s or [float("inf")]), 3),
        "averaging_s": round(statistics.mean(averaging_s or [float("inf")]), 3),
        "held_units": round(statistics.mean(peer.span.units for peer in result.world.peers), 2),
        "steps": len(values["step, s"]),
    }


def after_losses(scenario: Scenario, share: float, seed: int) -> dict[str, Any]:
    """Return a step after a share of the devices has vanished, beside steps of new plans for the others."""
    order = np.random.default_rng(seed).permutation(scenario.devices)
    gone, left = np.split(order, [round(share * scenario.devices)])
    trace = [Change(LOST_S, int(device), up=False) for device in gone]
    results = as_planned(some(scenario, left))
    results["live"] = step_s(scenario, trace=trace, since_s=LOST_S)
    return with_ratios(results)


def compared(scenario: Scenario) -> dict[str, Any]:
    """Return steps as planned, as wired live, and as chosen live."""
    results = as_planned(scenario)
    results["live"] = step_s(scenario)
    return with_ratios(results)


def as_planned(scenario: Scenario) -> dict[str, dict[str, float]]:
    """Return steps of the plan with its own and with live wiring, and of the fastest plan with one holder if that has other
    spans."""
    plan, fastest = planned(scenario), planned(scenario, holders=1)
    results = {"planned": step_s(scenario, plan.spans, plan.pipelines), "wired": step_s(scenario, plan.spans)}
    if plan.step_s:
        results["planned"]["estimated_s"] = round(plan.step_s, 3)
        results["wired"]["of_estimated"] = round(results["wired"]["step_s"] / plan.step_s, 3)
    if fastest.spans != plan.spans:
        results["fastest"] = step_s(scenario, fastest.spans)
    return results


def with_ratios(results: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Add the ratios of live and wired steps to the other kinds of steps, and return `results`."""
    for name, of in (("wired", "planned"), ("live", "planned"), ("live", "wired"), ("live", "fastest")):
        if of in results:
            results[name][f"of_{of}"] = round(results[name]["step_s"] / results[of]["step_s"], 3)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "scenarios", nargs="+", metavar="SCENARIO.json|N|NAME", help="a file, the seed of a network, or a name"
    )
    parser.add_argument("--gb", type=int, nargs="+", default=[8, 16, 32], help="memory of each card")
    parser.add_argument(
        "--cards", nargs="+", metavar="CARD", help="cards in turn instead of the scenario's, as A100 L4 T4"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the order of the devices")
    parser.add_argument(
        "--lose", type=float, default=0.0, help="share of the devices that vanish; instead of the others"
    )
    arguments = parser.parse_args()
    for name in arguments.scenarios:
        network = MADE_UP[name]() if name in MADE_UP else drawn(int(name)) if name.isdecimal() else Scenario.load(name)
        for label, scenario in variants(network, arguments.cards, arguments.gb, arguments.seed):
            found = after_losses(scenario, arguments.lose, arguments.seed) if arguments.lose else compared(scenario)
            print(json.dumps({"scenario": network.name, "cards": label, **found}), flush=True)


def variants(
    network: Scenario, cards: Sequence[str], memories_gb: Sequence[int], seed: int
) -> Iterator[tuple[str, Scenario]]:
    """Yield a label and the network: once with `cards`, or, without cards, for each memory size of `memories_gb`."""
    if cards:
        yield ", ".join(cards), with_cards(network, cards, seed)
    else:
        for gb in memories_gb:
            yield f"{gb} GB", prepared(network, gb, seed)


if __name__ == "__main__":
    main()
