"""Training with a bottleneck on fleets of home machines, simulated: volunteers against the same cards in one room. Prints JSON.

    python contrib/studies/thin_fleets.py [--minutes 2] [--only 1b 8b fusion]

`1b` and `8b`: 64 volunteers with cards of 8 to 24 GB (RTX 3060, 3080, 3090 and 4090 in turn), upload lines of 20 to 100 Mbit/s
(downloads five times as fast), 20 ms one way; 64 sequences of 1,024 tokens a step, one at a time. `1b` runs in 16 pipelines of
four peers with a boundary every four layers, `8b` in four of 16 with a boundary every two; layers are in proportion to the cards'
speeds, as far as memory allows. `fusion`: FusionAI's fifty RTX 3080 against four H100 PCIe, as in `consumer_cards.py`, one
pipeline or five, 128 microbatches of 2 x 1,024 tokens. Cards' speeds are rooflines of datasheet figures (docs/simulator.md).

`tokens/s` are those computed. `ratio` divides by those of the reference and by the steps that a loss takes with the bottleneck
(`plan/compression.py`, `FORMS`): the speed at which a loss is reached. Hidden sizes are divided by 16, by 8, and not at all.
Averaging sends bfloat16 in every step (`--average-every 1`), or what 30 local steps need (every 30), in the room as well. Local
steps need more of them for a loss, which is not counted. 0: no two steps in the longest time that was simulated.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from itertools import accumulate, pairwise, product
from typing import Any

import numpy as np
from consumer_cards import CONSUMER, DATACENTER, TRAINED
from shapes import cut, transformer

from swarmnode.codec.tensors import Codec
from swarmnode.plan.compression import FORMS
from swarmnode.plan.offline.planner_files import Scenario
from swarmnode.plan.view import Span
from swarmnode.simulate.environment.model import Model
from swarmnode.simulate.settings import Settings, TrainSettings
from swarmnode.simulate.simulation import Simulation
from swarmnode.swarm.records.run import Averaging

VOLUNTEERS = 64
CARDS = {"RTX 3060": 8, "RTX 3080": 10, "RTX 3090": 24, "RTX 4090": 24}  # GB lent
UPLOADS_MBPS = (20, 35, 50, 100)
DELAY_S = 0.02
MODELS = {
    # name: (model, peers of a pipeline, layers of a unit)
    "1b": (transformer("1b", 20, 2048, vocabulary=32000), 4, 4),
    "8b": (transformer("8b", 40, 4096, vocabulary=32000), 16, 2),
}
TRAIN = TrainSettings(microbatches=64, microbatch=1, sequence=1024)
FUSION_TRAIN = TrainSettings(microbatches=128, microbatch=2, sequence=1024)
DIVISORS = (1, 8, 16)
DOUBLINGS = 8  # of the simulated time, at most
STEPS = {form.divisor: form.steps for form in FORMS}


def narrowed(model: Model, divisor: int, layers: int) -> Model:
    """Return a model with a bottleneck of hidden / `divisor` numbers between units of `layers` layers; the model itself for 1."""
    if divisor == 1:
        return model
    inner = model.parameters[1:-1]
    groups = [sum(inner[first : first + layers]) for first in range(0, len(inner), layers)]
    cache = [sum(model.cache_bytes[1:-1][first : first + layers]) for first in range(0, len(inner), layers)]
    parameters = (model.parameters[0] + groups[0], *groups[1:-1], groups[-1] + model.parameters[-1])
    ends = tuple(min(end, len(inner)) for end in accumulate([layers] * len(groups)))
    rank = model.hidden // divisor
    return Model(model.name, parameters, parameters, tuple(cache), rank, wide=model.hidden, layer_ends=ends)


def volunteers(*, together: bool) -> Scenario:
    """Return the fleet over its home lines, or in one room on 10 Gbit/s."""
    cards = [list(CARDS)[number % len(CARDS)] for number in range(VOLUNTEERS)]
    up = np.array([1e6 * UPLOADS_MBPS[(number // len(CARDS)) % len(UPLOADS_MBPS)] for number in range(VOLUNTEERS)])
    apart = 1 - np.eye(VOLUNTEERS)
    return Scenario(
        name="one room" if together else "homes",
        regions=("here",) * VOLUNTEERS,
        delay_s=(1e-4 if together else DELAY_S) * apart,
        bandwidth_bps=np.full(apart.shape, 1e10) if together else np.minimum(up[:, None], 5 * up[None, :]),
        gpus=tuple(cards),
        peak_flops=(None,) * VOLUNTEERS,
        memory_bytes=tuple(CARDS[card] << 30 for card in cards),
    )


def spans_of(scenario: Scenario, model: Model, train: TrainSettings, stages: int) -> list[Span]:
    """Return the spans of all peers, in pipelines of `stages` peers: units in proportion to speed, as far as memory allows."""
    peers = Simulation(scenario, model, Settings("train", train=train)).world.peers
    spans: list[Span] = []
    for first in range(0, len(peers) - stages + 1, stages):
        group = peers[first : first + stages]
        speeds = [1 / peer.device.prompt_s(1, train.tokens) for peer in group]
        units = [span.units for span in cut(speeds, model.units)]
        rooms = [peer.capacity_units for peer in group]
        while any(over := [max(0, mine - room) for mine, room in zip(units, rooms, strict=True)]):
            giver = int(np.argmax(over))
            taker = max(range(stages), key=lambda one: (units[one] < rooms[one], speeds[one] / (units[one] + 1)))
            if units[taker] >= rooms[taker]:
                raise SystemExit(f"{model.name}: {stages} peers have room for {sum(rooms)} of {model.units} units")
            units[giver], units[taker] = units[giver] - 1, units[taker] + 1
        edges = [0, *accumulate(units)]
        spans += [Span(start, end) for start, end in pairwise(edges)]
    return spans + [Span(0, 0)] * (len(peers) - len(spans))


def tokens_per_s(scenario: Scenario, model: Model, train: TrainSettings, minutes: float, stages: int) -> float:
    """Simulate until two steps are made, and return the tokens/s of those after the first, in pipelines of `stages` peers."""
    spans = spans_of(scenario, model, train, stages)
    pipelines = [list(range(first, first + stages)) for first in range(0, len(spans) - stages + 1, stages)]
    steps_s: list[float] = []
    line_bps = float(np.median(scenario.bandwidth_bps))
    crossing_s = 8 * train.tokens * model.hidden * (1.0 if model.wide else 0.56) / line_bps
    minutes = max(minutes, 2.2 * (train.microbatches / len(pipelines) + stages) * crossing_s / 60)
    for _ in range(DOUBLINGS):
        settings = Settings("train", hours=minutes / 60, train=train)
        result = Simulation(scenario, model, settings, spans=spans, pipelines=pipelines).run()
        steps_s = result.measures.values["step, s"]
        print(
            f"{scenario.name}, {model.name}, {model.hidden}: {minutes:.1f} min, {len(steps_s)} steps", file=sys.stderr
        )
        if len(steps_s) >= 2:
            return train.microbatches * train.tokens * (len(steps_s) - 1) / sum(steps_s[1:])
        minutes *= 2
    return 0.0


def row(per_s: float, reference_per_s: float, divisor: int) -> dict[str, float]:
    return {"tokens/s": round(per_s, 1), "ratio": round(per_s / reference_per_s / STEPS[divisor], 3)}


def settings_of(divisor: int, train: TrainSettings, every: int) -> TrainSettings:
    averaging = Averaging(every=every, codec=Codec.BF16, outer_lr=0.7 if every > 1 else 1.0)
    return replace(train, compress="auto" if divisor == 1 else "int8", averaging=averaging)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2.0, help="simulated time; more where no two steps fit")
    parser.add_argument("--only", nargs="+", choices=(*MODELS, "fusion"), default=[*MODELS, "fusion"])
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for name in [one for one in options.only if one in MODELS]:
        model, stages, layers = MODELS[name]
        for every in (1, 30):
            whole = settings_of(1, TRAIN, every)
            room = tokens_per_s(volunteers(together=True), model, whole, options.minutes, stages)
            results[f"{name}, one room, averaging every {every}"] = {"tokens/s": round(room, 1)}
            for divisor in DIVISORS:
                thin, train = narrowed(model, divisor, layers), settings_of(divisor, TRAIN, every)
                found = tokens_per_s(volunteers(together=False), thin, train, options.minutes, stages)
                results[f"{name}, homes, 1/{divisor}, averaging every {every}"] = row(found, room, divisor)
                print(json.dumps(results), flush=True)
    if "fusion" in options.only:
        here = tokens_per_s(DATACENTER.network(1e-5, 100.0), TRAINED, FUSION_TRAIN, options.minutes, 4)
        for gbps, divisor, pipelines in product((0.1, 1.0), DIVISORS, (1, 5)):
            thin, train = narrowed(TRAINED, divisor, 1), settings_of(divisor, FUSION_TRAIN, 1)
            stages = min(CONSUMER.count // pipelines, thin.units)
            found = tokens_per_s(CONSUMER.network(0.005, gbps), thin, train, options.minutes, stages)
            results[f"fusion, {gbps:g} Gbit/s, 1/{divisor}, pipelines: {pipelines}"] = row(found, here, divisor)
            print(json.dumps(results), flush=True)
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
