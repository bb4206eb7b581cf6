"""Cost of peers that come and go: serving and training at 0, 10 and 100 % of the peers an hour. Prints JSON.

    python contrib/studies/churn.py geo48_slow_links.json dtfm_regional_geo.json [--hours 1]

Serving: a Llama-2-7B-like model on the 48 cards of the first scenario, two sessions a second. Training: GPT-2 XL on the second one,
with V100s, steps of 128 sequences of 1024 tokens, two at a time. Leavers go without a word and another peer
comes after five minutes on average. `cost` is the share of tokens lost against no churn.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
from shapes import transformer

from swarmnode.plan.offline.planner_files import Scenario
from swarmnode.simulate.environment.model import Model
from swarmnode.simulate.settings import ServeSettings, Settings, TrainSettings
from swarmnode.simulate.simulation import Simulation, SimulationResult

RATES = (0.0, 0.1, 1.0)  # of the peers, an hour
LLAMA_7B = transformer("llama-7b-like", 32, 4096, vocabulary=32000)
GPT2_XL = transformer("gpt2-xl", 48, 1600, vocabulary=50257)
KEPT = ("peers lost", "sessions begun", "sessions done", "sessions failed", "steps", "moves")


def figures(result: SimulationResult, name: str) -> dict[str, Any]:
    totals, values = result.measures.totals, result.measures.values
    told: dict[str, Any] = {"tokens/s": totals[name] / result.settings.seconds}
    told |= {key: totals[key] for key in KEPT if key in totals}
    for key in ("first token, s", "between tokens, s", "session, s", "step, s"):
        if key in values:
            told[key] = {f"p{percent}": float(np.percentile(values[key], percent)) for percent in (50, 99)}
    told |= {
        key: value for key, value in totals.items() if key.startswith(("lost", "replayed", "steps lost", "waiting"))
    }
    return told


def study(scenario: Scenario, model: Model, settings: Settings, name: str) -> dict[str, Any]:
    """Simulate one workload at all rates, and add each rate's `cost` against no churn."""
    found: dict[str, Any] = {}
    for rate in RATES:
        result = Simulation(scenario, model, dataclasses.replace(settings, churn=rate)).run()
        found[f"{rate:.0%}"] = figures(result, name)
    calm = found["0%"]["tokens/s"]
    for told in found.values():
        told["cost"] = 1 - told["tokens/s"] / calm
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("serving", type=Path)
    parser.add_argument("training", type=Path)
    parser.add_argument("--hours", type=float, default=1.0)
    arguments = parser.parse_args()
    homes, regions = Scenario.load(arguments.serving), Scenario.load(arguments.training)
    cards = dataclasses.replace(regions, gpus=("V100",) * regions.devices)
    train = TrainSettings(microbatches=64, microbatch=2, sequence=1024)
    results = {
        "serve": study(homes, LLAMA_7B, Settings(hours=arguments.hours, serve=ServeSettings(2.0)), "tokens"),
        "train": study(cards, GPT2_XL, Settings("train", hours=arguments.hours, train=train), "tokens trained"),
    }
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
