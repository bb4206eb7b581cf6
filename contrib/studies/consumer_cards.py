"""FusionAI (arXiv 2309.01172): fifty RTX 3080 against four H100. Prints JSON.

    python contrib/studies/consumer_cards.py [--minutes 0.4]

Their claim: 50 RTX 3080 match the throughput of 4 H100, which cost far more. Tested here by training GPT-2 XL (48 layers of width
1600, embedding and head: 50 units, one for each 3080), 1024 sequences of 1024 tokens a step, 2 at a time. The H100s (PCIe) are
four stages on links of 100 Gbit/s; the 3080s are one pipeline of 50 stages, or five of ten that average their gradients, on links
of 0.1, 1 and 10 Gbit/s with 5 ms between them, the codecs chosen by the live controllers. Speeds are rooflines of datasheet
figures, see docs/simulator.md: what the datasheets promise is 2,975 against 3,024 TFLOP/s. `ratio` is 3080s over H100s.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from shapes import cut, even_network, transformer

from swarmnode.simulate.settings import Settings, TrainSettings
from swarmnode.simulate.simulation import Simulation

MODEL = transformer("gpt2-xl", 48, 1600, vocabulary=50257)
TRAIN = TrainSettings(microbatches=512, microbatch=2, sequence=1024)
LINKS_GBPS = (0.1, 1.0, 10.0)


def tokens_per_s(gpu: str, stages: int, replicas: int, *, delay_s: float, gbps: float, minutes: float) -> float:
    """Of steps that were finished: pipelines of equally many units a stage."""
    count = stages * replicas
    scenario = even_network(gpu, count, delay_s=delay_s, bandwidth_bps=gbps * 1e9)
    spans = cut([1.0] * stages, MODEL.units)
    pipelines = [list(range(pipeline * stages, (pipeline + 1) * stages)) for pipeline in range(replicas)]
    steps_s: list[float] = []
    while len(steps_s) < 2:  # the first one is for the controllers
        settings = Settings("train", hours=minutes / 60, train=TRAIN)
        result = Simulation(scenario, MODEL, settings, spans=spans * replicas, pipelines=pipelines).run()
        steps_s = result.measures.values["step, s"]
        minutes *= 4
    steps_s = steps_s[1:]
    return TRAIN.microbatches * TRAIN.tokens * len(steps_s) / sum(steps_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--minutes", type=float, default=0.4, help="simulated time of each; more where no two steps fit"
    )
    minutes = parser.parse_args().minutes
    h100 = tokens_per_s("H100 PCIe", 4, 1, delay_s=1e-5, gbps=100.0, minutes=minutes)
    results: dict[str, Any] = {"4 x H100 PCIe, tokens/s": h100}
    for stages, replicas in ((50, 1), (10, 5)):
        for gbps in LINKS_GBPS:
            speed = tokens_per_s("RTX 3080", stages, replicas, delay_s=0.005, gbps=gbps, minutes=minutes)
            name = f"50 x RTX 3080, {replicas} x {stages} stages, {gbps:g} Gbit/s"
            results[name] = {"tokens/s": speed, "ratio": speed / h100}
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
