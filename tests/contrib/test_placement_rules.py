"""contrib/benchmarks/placement_rules.py: rules on whole swarms, ours against the bound, and against Petals' and SWARM's."""

import functools
import random
import statistics
from typing import Any

import pytest

from swarmnode.plan.spans.span_placement import Joiner
from tests.contrib.script import CONTRIB, load

rules = load(CONTRIB / "benchmarks" / "placement_rules.py")

ROUNDS = 5
SWARMS = 10


def random_joiners(seed: int, units: int) -> list[Joiner]:
    """8 to 40 peers of very unequal speed with memory for about four copies of the model."""
    chance = random.Random(seed)
    count = chance.randint(8, 40)
    mean_capacity = max(1.0, 4 * units / count)
    return [
        Joiner(
            f"peer {seed} {index}",
            max(1, min(units, round(mean_capacity * chance.uniform(0.5, 1.5)))),
            100 * chance.lognormvariate(0, 0.8),
            float(index),
        )
        for index in range(count)
    ]


@functools.cache
def settled(rule: Any, seed: int, units: int = 16) -> tuple[float, float, bool]:
    """Quality at rest, quality at rest after 30 % vanished, and whether they came to rest both times."""
    settling = rules.Settling(units, rule)
    settling.join(random_joiners(seed, units))
    chance = random.Random(seed)
    first = settling.settle(ROUNDS, chance)
    before = settling.quality()
    settling.vanish(chance.sample(sorted(settling.peers), int(0.3 * len(settling.peers))))
    again = settling.settle(ROUNDS, chance)
    return before, settling.quality(), first and again


def test_best_response_comes_close_to_the_bound_and_to_rest() -> None:
    outcomes = [settled(rules.BEST_RESPONSE, seed) for seed in range(SWARMS)]
    for figures in ([before for before, _, _ in outcomes], [after for _, after, _ in outcomes]):
        assert statistics.median(figures) >= 0.95
        assert min(figures) >= 0.85
    assert all(rests for _, _, rests in outcomes)


@pytest.mark.parametrize("other", [rules.petals(), rules.swarm(16, 2)], ids=lambda rule: rule.name)
def test_other_rules_recover_less(other: Any) -> None:
    ours = [settled(rules.BEST_RESPONSE, seed)[1] for seed in range(SWARMS)]
    theirs = [settled(other, seed)[1] for seed in range(SWARMS)]
    assert statistics.median(ours) > statistics.median(theirs)
    assert statistics.mean(ours) > statistics.mean(theirs) + 0.03


def test_the_same_seed_gives_the_same_swarm() -> None:
    def spans() -> dict[str, object]:
        settling = rules.Settling(16, rules.BEST_RESPONSE)
        settling.join(random_joiners(3, 16))
        settling.settle(ROUNDS, random.Random(1))
        return {peer: view.span for peer, (_, view) in settling.peers.items()}

    assert spans() == spans()
