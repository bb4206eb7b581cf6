"""Who adds up how much: by lines that peers claim to have."""

from __future__ import annotations

import math

import pytest

from swarmnode.codec.training_messages import MOST_SHARE, USUAL_SHARE
from swarmnode.plan.training.averaging import LEAST_SHARE, part_shares


def test_a_line_of_a_tenth_adds_up_a_tenth() -> None:
    shares = part_shares([100e6, 100e6, 10e6, 100e6])
    assert shares[0] == shares[1] == shares[3] == USUAL_SHARE
    assert shares[2] / shares[0] == pytest.approx(0.1, abs=0.03)
    assert part_shares([100e6, 50e6, 200e6]) == (16, 8, 24), "a half, and no more than all others together"


@pytest.mark.parametrize("uplinks_bps", [[], [1e6], [1e6, 1e9], [0.0] * 5, [7e6] * 5, [math.inf, 0.0, 0.0]])
def test_where_nothing_is_to_be_gained_or_known_all_add_up_as_much(uplinks_bps: list[float]) -> None:
    assert part_shares(uplinks_bps) == (USUAL_SHARE,) * len(uplinks_bps)


def test_an_unknown_line_counts_as_a_usual_one() -> None:
    assert part_shares([8e6, 0.0, 8e6, -1.0]) == (USUAL_SHARE,) * 4


@pytest.mark.parametrize("claimed_bps", [1e12, 1e300, math.inf])
@pytest.mark.parametrize("others", [2, 3, 7, 63])
def test_who_claims_the_world_gets_half_of_it_at_most(claimed_bps: float, others: int) -> None:
    shares = part_shares([10e6] * others + [claimed_bps])
    assert shares[-1] <= MOST_SHARE and shares[-1] <= sum(shares[:-1])
    assert min(shares) >= LEAST_SHARE and set(shares[:-1]) == {USUAL_SHARE}


def test_some_who_claim_little_do_not_leave_it_all_to_one() -> None:
    shares = part_shares([1.0, 1.0, 1.0, 10e6])
    assert shares == (16, 16, 16, 48)
    assert min(part_shares([1.0, 10e6, 10e6])) == LEAST_SHARE
