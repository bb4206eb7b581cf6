"""What a pass takes, from those that were run."""

from __future__ import annotations

import pytest

from swarmnode.plan.serving.scheduler import PassCost


def noted(*passes: tuple[int, float]) -> PassCost:
    cost = PassCost()
    for positions, took_s in passes:
        cost.record(positions, took_s)
    return cost


def test_a_line_is_found() -> None:
    cost = noted((1, 0.011), (64, 0.074), (128, 0.138), (4, 0.014))
    assert cost.fixed_s == pytest.approx(0.010)
    assert cost.position_s == pytest.approx(0.001)
    assert cost.seconds(32) == pytest.approx(0.042)
    assert cost.positions(0.042) == pytest.approx(32)


def test_where_all_passes_were_alike_nothing_is_taken_as_free() -> None:
    cost = noted(*[(4, 0.02)] * 300)
    assert cost.fixed_s == pytest.approx(0)
    assert cost.seconds(128) == pytest.approx(0.64)


def test_what_came_long_ago_counts_no_more() -> None:
    slow = [(positions, 1.0 + positions) for positions in (1, 64)]
    fast = [(positions, 0.001 * (1 + positions)) for positions in (1, 64)]
    assert noted(*slow, *fast * 300).position_s == pytest.approx(0.001, rel=0.05)


def test_no_part_is_ever_negative() -> None:
    falling = noted((1, 1.0), (100, 0.1))
    assert falling.position_s == 0 and falling.positions(2.0) == float("inf")
    steep = noted((10, 0.001), (100, 1.0))
    assert steep.fixed_s >= 0 and steep.position_s > 0


def test_nothing_is_known_before_the_first_pass() -> None:
    cost = PassCost()
    assert (cost.fixed_s, cost.position_s, cost.seconds(5)) == (0.0, 0.0, 0.0)
