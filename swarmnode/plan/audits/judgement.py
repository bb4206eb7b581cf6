"""What the comparison of a hop's work with a replica's says: the same within honest noise, or not.

Honest replicas differ beyond the tolerance now and then, and draw another token. So it is counted how often, and the work is false
where honest replicas would differ so often once in ten million times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from swarmnode.plan.audits.tolerances import Tolerance

CHANCE = 1e-7


@dataclass(frozen=True)
class Judgement:
    """Of `compared` positions `beyond` were not the same; `worst` is the largest deviation over what is tolerated."""

    compared: int
    beyond: int
    worst: float
    false: bool


def judge_states(deviations: Sequence[float], tolerance: Tolerance) -> Judgement:
    """Of what a hop sent on at a segment's positions: relative deviations from what a replica sent on."""
    ratios = [deviation / tolerance.deviation for deviation in deviations]
    beyond = sum(not ratio <= 1.0 for ratio in ratios)  # so that NaN is beyond
    return _judgement(len(ratios), beyond, max(ratios, default=0.0), tolerance.beyond)


def judge_tokens(drawn: Sequence[int], again: Sequence[int], tolerance: Tolerance) -> Judgement:
    """Of the tokens that the last hop drew, and those that a replica drew at the same positions after the same text."""
    compared = min(len(drawn), len(again))
    other = sum(one != two for one, two in zip(drawn, again, strict=False))
    return _judgement(compared, other, other / max(1.0, tolerance.other_tokens * compared), tolerance.other_tokens)


def _judgement(compared: int, beyond: int, worst: float, rate: float) -> Judgement:
    return Judgement(compared, beyond, worst, _chance_of_at_least(beyond, compared, rate) < CHANCE)


def _chance_of_at_least(beyond: int, compared: int, rate: float) -> float:
    """That so many of so many happen which each have this chance (the binomial's upper tail)."""
    if beyond == 0:
        return 1.0
    counts = range(beyond, compared + 1)
    return math.fsum(math.comb(compared, count) * rate**count * (1 - rate) ** (compared - count) for count in counts)
