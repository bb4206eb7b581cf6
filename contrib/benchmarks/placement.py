"""Quality of decentralised placement: throughput against the max-flow upper bound on random heterogeneous swarms.

    python contrib/benchmarks/placement.py [--swarms 200] [--scarce]

Swarms of 8 to 64 peers with cards of the GPU table: memory and memory bandwidth (decoding is bound by it), a part of each
lent. The model is as large as the memory allows to hold it 2 to 6 times (--scarce: 1.3 to 2 times). Peers join one after
another, decide at most 5 times each, lose 30 % of all, and decide at most 5 times again. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable

from placement_rules import BEST_RESPONSE, Rule, Settling, petals, swarm

from swarmnode.plan.offline.gpus import gpus_by_name
from swarmnode.plan.spans.span_placement import Joiner

UNITS = (12, 16, 24, 32, 40)
ROUNDS = 5
VANISHING = 0.3
PLENTY, SCARCE = (2.0, 6.0), (1.3, 2.0)


def random_swarm(chance: random.Random, copies: tuple[float, float]) -> tuple[int, list[Joiner]]:
    """Draw the number of a model's units, and the peers that lend memory for it."""
    units = chance.choice(UNITS)
    cards = [chance.choice(list(gpus_by_name().values())) for _ in range(chance.randint(8, 64))]
    lent_bytes = [card.memory_bytes * chance.uniform(0.4, 0.9) for card in cards]
    held = math.exp(chance.uniform(*map(math.log, copies)))
    unit_bytes = min(sum(lent_bytes) / (held * units), min(lent_bytes))
    return units, [
        Joiner(
            f"peer {index}",
            min(units, int(lent / unit_bytes)),
            card.memory_bytes_per_s * chance.uniform(0.5, 1.0) / unit_bytes,
            float(index),
        )
        for index, (card, lent) in enumerate(zip(cards, lent_bytes, strict=True))
    ]


def outcome(rule: Rule, units: int, joiners: list[Joiner], chance: random.Random) -> dict[str, float]:
    """Return the quality of a swarm after all have joined, after settling, after a loss of peers, and settled again."""
    settling = Settling(units, rule)
    settling.join(joiners)
    result = {"joined": settling.quality()}
    result["at_rest"] = float(settling.settle(ROUNDS, chance))
    result["settled"] = settling.quality()
    settling.vanish(chance.sample(sorted(settling.peers), int(VANISHING * len(settling.peers))))
    result["vanished"] = settling.quality()
    result["at_rest_again"] = float(settling.settle(ROUNDS, chance))
    result["settled_again"] = settling.quality()
    result["moves_per_peer"] = sum(settling.moves) / len(joiners)
    return result


def outcomes_of(units: int, joiners: list[Joiner], seed: int) -> dict[str, dict[str, float]]:
    """Return the outcomes by rule. SWARM gets the best of three stage sizes, which are the same for all peers."""
    capacities = sorted(joiner.capacity_units for joiner in joiners)
    sizes = {capacities[0], capacities[len(capacities) // 4], capacities[len(capacities) // 2]}
    stages = [outcome(swarm(units, size), units, joiners, random.Random(seed)) for size in sorted(sizes)]
    found = {rule.name: outcome(rule, units, joiners, random.Random(seed)) for rule in (BEST_RESPONSE, petals())}
    return {**found, "SWARM": max(stages, key=lambda result: result["settled"])}


def summary(outcomes: list[dict[str, float]]) -> dict[str, float]:
    """Return the median and the least of the settled qualities, and means of the other figures."""
    figures: dict[str, float] = {}
    kinds: dict[str, Callable[[list[float]], float]] = {"median": statistics.median, "worst": min}
    for name in ("settled", "settled_again"):
        for kind, of in kinds.items():
            figures[f"{name}_{kind}"] = round(of([outcome[name] for outcome in outcomes]), 4)
    for name in ("at_rest", "at_rest_again", "moves_per_peer", "joined", "vanished"):
        figures[f"{name}_mean"] = round(statistics.mean(outcome[name] for outcome in outcomes), 4)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--swarms", type=int, default=200)
    parser.add_argument(
        "--scarce", action="store_true", help="memory for 1.3 to 2 copies of the model instead of 2 to 6"
    )
    arguments = parser.parse_args()
    outcomes: dict[str, list[dict[str, float]]] = {}
    started_s = time.perf_counter()
    for seed in range(arguments.swarms):
        units, joiners = random_swarm(random.Random(seed), SCARCE if arguments.scarce else PLENTY)
        for name, found in outcomes_of(units, joiners, seed).items():
            outcomes.setdefault(name, []).append(found)
    report = {name: summary(results) for name, results in outcomes.items()}
    print(
        json.dumps(
            {"swarms": arguments.swarms, "rules": report, "seconds": round(time.perf_counter() - started_s)}, indent=2
        )
    )


if __name__ == "__main__":
    main()
