"""FusionLLM (arXiv 2410.12707): what clusters by bandwidth and AdaTopK gain on slow links. Prints JSON.

    python contrib/studies/slow_links.py geo48_slow_links.json [--orders 3] [--minutes 60]

GPT-2 XL (48 layers of width 1600, embedding and head) as one pipeline through all 48 devices, a step of 16 sequences of 1024
tokens. The baseline: units divided equally, uncompressed, devices in an order that knows nothing of bandwidth (median of
`--orders` draws), and in the order of the file, in which clusters happen to lie together. Against it: clusters of devices that
fast links join, in the order that crosses the least slow ones, and units in proportion to the devices' speeds (their OP-Fence);
AdaTopK on the links (largest ratio 100); both; and both with the choice of this project's own controllers instead. Only time is
simulated, not what a codec does to the loss: see docs/decisions/compression.md for that.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
from collections.abc import Sequence
from pathlib import Path

from shapes import cut, transformer

from swarmnode.plan.offline.scenario import Scenario
from swarmnode.plan.view import Span
from swarmnode.simulate.environment.devices import device_of
from swarmnode.simulate.environment.model import Model
from swarmnode.simulate.settings import Settings, TrainSettings
from swarmnode.simulate.simulation import Simulation

MODEL = transformer("gpt2-xl", 48, 1600, vocabulary=50257)
TOKENS = 1024
FAST_BPS = 1e9  # links that make a cluster


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


def speeds(scenario: Scenario, model: Model, order: Sequence[int]) -> list[float]:
    return [1 / device_of(scenario, device, model).prompt_s(1, TOKENS) for device in order]


def step_s(scenario: Scenario, order: Sequence[int], spans: Sequence[Span], compress: str, minutes: float) -> float:
    """Mean seconds of a step after the first, in which controllers find their rungs."""
    span_of = dict(zip(order, spans, strict=True))
    train = TrainSettings(microbatches=16, sequence=TOKENS, compress=compress)
    settings = Settings("train", hours=minutes / 60, train=train)
    placed = [span_of[device] for device in range(scenario.devices)]
    result = Simulation(scenario, MODEL, settings, spans=placed, pipelines=[list(order)]).run()
    return statistics.mean(result.measures.values["step, s"][1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("scenario", type=Path)
    parser.add_argument("--orders", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=60.0)
    arguments = parser.parse_args()
    scenario = Scenario.load(arguments.scenario)
    as_filed = list(range(scenario.devices))
    drawn = [random.Random(seed).sample(as_filed, len(as_filed)) for seed in range(arguments.orders)]
    fenced = clustered_order(scenario)
    equal, by_speed = cut([1.0] * len(as_filed), MODEL.units), cut(speeds(scenario, MODEL, fenced), MODEL.units)

    def median_s(compress: str) -> float:
        return statistics.median(step_s(scenario, order, equal, compress, arguments.minutes) for order in drawn)

    steps = {
        "equal, any order, none": median_s("none"),
        "equal, any order, adatopk": median_s("adatopk"),
        "equal, file order, none": step_s(scenario, as_filed, equal, "none", arguments.minutes),
        "clustered, none": step_s(scenario, fenced, by_speed, "none", arguments.minutes),
        "clustered, adatopk": step_s(scenario, fenced, by_speed, "adatopk", arguments.minutes),
        "clustered, auto": step_s(scenario, fenced, by_speed, "auto", arguments.minutes),
    }
    gains = {
        f"over {base}": steps[base] / steps["clustered, adatopk"]
        for base in ("equal, any order, none", "equal, file order, none")
    }
    print(json.dumps({"step_s": steps, "gain of clusters and adatopk": gains}, indent=1))


if __name__ == "__main__":
    main()
