"""FusionAI (arXiv 2309.01172): fifty RTX 3080 against four H100, in training and inference, per watt and per dollar. Prints JSON.

    python contrib/studies/consumer_cards.py [--minutes 0.4] [--served-minutes 2] [--clients 64]

Their claim: 50 RTX 3080 match the throughput of 4 H100, which cost far more. The H100s (PCIe) stand on links of 100 Gbit/s, the
3080s on links of 0.1, 1 and 10 Gbit/s with 5 ms between them. Training: GPT-2 XL (48 layers of width 1600, embedding and head: 50
units, one for each 3080), 1024 sequences of 1024 tokens a step, 2 at a time; four stages of H100s, and 3080s as one pipeline of
50 stages or five of ten that average, the codecs chosen by the live controllers. Inference: a model of 64 billion parameters (80
layers of width 8192, 16 bits) that peers place themselves, and `--clients` at once, each with prompts of 512 tokens and texts
of 128. Speeds are rooflines of datasheet figures, see docs/simulator.md: what the datasheets promise is 2,975 against 3,024
TFLOP/s, and 38 against 8 TB/s. `ratio` is 3080s over H100s; per watt and per dollar by the cards' power limits and prices alone,
without the machines around them.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from typing import Any

from shapes import cut, even_network, transformer

from swarmnode.plan.offline.planner_files import Scenario
from swarmnode.simulate.settings import ServeSettings, Settings, TrainSettings
from swarmnode.simulate.simulation import Simulation

TRAINED = transformer("gpt2-xl", 48, 1600, vocabulary=50257)
SERVED = transformer("64b", 80, 8192, vocabulary=32000)
TRAIN = TrainSettings(microbatches=512, microbatch=2, sequence=1024)
LINKS_GBPS = (0.1, 1.0, 10.0)


@dataclass(frozen=True)
class Fleet:
    """`count` equal cards: watts by the datasheet, dollars at their launch (the H100's price is not listed: what shops
    took)."""

    gpu: str
    count: int
    watts_each: float
    dollars_each: float

    def ratios(self, per_s: float, other: Fleet, other_per_s: float) -> dict[str, float]:
        """Return the speed `per_s`, and its ratios to another fleet's: plain, per watt and per dollar."""
        watts = self.count * self.watts_each / (other.count * other.watts_each)
        dollars = self.count * self.dollars_each / (other.count * other.dollars_each)
        ratio = per_s / other_per_s
        return {"tokens/s": per_s, "ratio": ratio, "per watt": ratio / watts, "per dollar": ratio / dollars}

    def network(self, delay_s: float, gbps: float) -> Scenario:
        """Return a network of cards at equal distances from one another."""
        return even_network(self.gpu, self.count, delay_s=delay_s, bandwidth_bps=gbps * 1e9)


CONSUMER, DATACENTER = Fleet("RTX 3080", 50, 320.0, 699.0), Fleet("H100 PCIe", 4, 350.0, 30_000.0)


def trained_per_s(scenario: Scenario, stages: int, minutes: float) -> float:
    """Simulate pipelines of `stages` even stages, and return tokens/s of the steps after the first."""
    replicas = scenario.devices // stages
    spans = cut([1.0] * stages, TRAINED.units)
    pipelines = [list(range(pipeline * stages, (pipeline + 1) * stages)) for pipeline in range(replicas)]
    steps_s: list[float] = []
    while len(steps_s) < 2:  # the first one is for the controllers
        settings = Settings("train", hours=minutes / 60, train=TRAIN)
        result = Simulation(scenario, TRAINED, settings, spans=spans * replicas, pipelines=pipelines).run()
        steps_s = result.measures.values["step, s"]
        minutes *= 4
    steps_s = steps_s[1:]
    return TRAIN.microbatches * TRAIN.tokens * len(steps_s) / sum(steps_s)


def served_per_s(scenario: Scenario, clients: int, minutes: float) -> float:
    """Return the tokens/s of all clients in the second half of the time, when their sessions no longer begin together."""
    settings = Settings(hours=minutes / 60, sample_s=30 * minutes, serve=ServeSettings(clients=clients))
    return Simulation(scenario, SERVED, settings).run().measures.curves["tokens"][-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--minutes", type=float, default=0.4, help="simulated time of each; of training more where no two steps fit"
    )
    parser.add_argument("--served-minutes", type=float, default=2.0, help="simulated time of each, of inference")
    parser.add_argument("--clients", type=int, default=64, help="clients that generate text at once")
    arguments = parser.parse_args()
    minutes, serving = arguments.minutes, (arguments.clients, arguments.served_minutes)
    here = DATACENTER.network(1e-5, 100.0)
    trained, served = trained_per_s(here, 4, minutes), served_per_s(here, *serving)
    results: dict[str, Any] = {"4 x H100 PCIe": {"trained tokens/s": trained, "generated tokens/s": served}}
    for gbps in LINKS_GBPS:
        homes = CONSUMER.network(0.005, gbps)
        for stages in (50, 10):
            name = f"training, {CONSUMER.count // stages} x {stages} stages, {gbps:g} Gbit/s"
            results[name] = CONSUMER.ratios(trained_per_s(homes, stages, minutes), DATACENTER, trained)
        generated = served_per_s(homes, *serving)
        results[f"inference, {gbps:g} Gbit/s"] = CONSUMER.ratios(generated, DATACENTER, served)
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
