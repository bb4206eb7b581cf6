"""How many guesses are sent ahead: by acceptance, turn and cost; none without gain, and rare retries."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from swarmnode.plan.serving.draft_budget import (
    FIRST_REST,
    LONGEST_REST,
    MAX_WINDOW,
    OVER_S,
    PROBE,
    MeasuredBudget,
    Proposer,
    RowCost,
    RowLoad,
    batch,
    busiest,
    token_s,
)


def budget(cost: RowCost, *, turn_s: float, acceptance: float, name: str = "lookup") -> MeasuredBudget:
    one = MeasuredBudget(lambda: cost)
    one.turn(turn_s)
    one.proposer(name).acceptance = acceptance
    one.proposer(name).best = None
    one.proposer(name).allowed = MAX_WINDOW
    return one


def simulated_token_s(window: int, acceptance: float, turn_s: float, cost: RowCost, tokens: int = 20_000) -> float:
    """Return the seconds of a token when guesses go in batches along a ring whose busiest hop computes one pass at a time.

    Guesses that follow a wrong one are dropped unless their pass has begun.
    """
    chance = random.Random(1)
    rest_s = turn_s - cost.pass_s - cost.position_s
    now_s = free_s = 0.0
    done = 0
    while done < tokens:
        together = batch(window)
        waiting = [1 + together, *([together] * (window // together - 1)), window % together]
        sent: list[tuple[float, int]] = []  # the verdict's time and the rows of each batch behind the true token
        is_right, known = True, 1  # the true token needs no luck
        while is_right and done < tokens:
            for rows in (rows for rows in waiting if rows):
                free_s = max(free_s, now_s) + cost.pass_s + rows * cost.position_s
                sent.append((free_s + rest_s, rows))
            now_s, rows = sent.pop(0)
            right = next((row for row in range(known, rows) if chance.random() >= acceptance), rows)
            done, known, is_right, waiting = done + right, 0, right == rows, [rows]
    return now_s / done


@pytest.mark.parametrize("acceptance", [0.5, 0.8, 0.95, 0.99])
@pytest.mark.parametrize("turn_s", [0.01, 0.1])
def test_the_forecast_is_about_what_a_ring_takes(acceptance: float, turn_s: float) -> None:
    cost = RowCost(0.001, 0.0003)
    for window in (1, 4, 16):
        expected_s = token_s(window, Proposer(acceptance), turn_s, cost, cost.in_turn(turn_s))
        assert expected_s == pytest.approx(simulated_token_s(window, acceptance, turn_s, cost), rel=0.35)


def test_sure_guesses_fill_the_ring_and_unsure_ones_do_not() -> None:
    cost = RowCost(0.002, 0.001)
    sure = budget(cost, turn_s=0.15, acceptance=0.98)
    unsure = budget(cost, turn_s=0.15, acceptance=0.4)
    assert sure.window() > 16
    assert 0 < unsure.window() < 8


def test_dear_rows_and_short_turns_mean_fewer_guesses() -> None:
    windows = [budget(RowCost(0.001, row_s), turn_s=0.1, acceptance=0.8).window() for row_s in (1e-4, 1e-3, 1e-2)]
    assert windows == sorted(windows, reverse=True)
    assert windows[0] > windows[-1]
    far, near = (budget(RowCost(0.001, 0.001), turn_s=turn_s, acceptance=0.8).window() for turn_s in (0.3, 0.005))
    assert far > near


def test_a_new_proposer_begins_with_few_guesses_in_a_crowded_ring() -> None:
    one = MeasuredBudget(lambda: RowCost(0.002, 0.001, 9, 0.15, hops=3.0))
    one.turn(0.15)
    assert one.window() == PROBE
    one.verdict("lookup", 3, 0)
    assert one.window() == PROBE + 3
    quiet = MeasuredBudget(lambda: RowCost(0.002, 0.001))
    quiet.turn(0.15)
    assert quiet.window() > PROBE + 3


def test_under_load_guesses_go_last() -> None:
    windows = [
        budget(RowCost(0.004, 0.001, 3, load, hops=3.0), turn_s=0.05, acceptance=0.7)._best(Proposer(0.7)).window
        for load in (0.0, 0.4, 0.6, 1.0)
    ]
    assert windows == sorted(windows, reverse=True)
    assert windows[0] > windows[1] > windows[-1] == 0
    loaded = budget(RowCost(0.004, 0.004, 99, 1.0), turn_s=0.05, acceptance=0.6)
    loaded.verdict("lookup", 1, 1)
    assert loaded.window() == 0, "the others would lose more than the session gains"
    assert loaded.count(0) == 0


def test_many_sessions_are_a_load_even_where_none_is_measured() -> None:
    few, many = (RowCost(0.004, 0.001, sharing) for sharing in (0, 99))
    assert few.in_turn(0.1).tokens_per_s == 0.0
    assert RowCost(0.004, 0.001, 0, 1.0).in_turn(0.1).tokens_per_s == 0.0, "a session alone takes nothing from others"
    assert many.in_turn(0.1).tokens_per_s == pytest.approx(990.0)


def test_a_pass_is_filled_up_unless_another_one_costs_less() -> None:
    few, many = (RowCost(0.004, 0.001, sharing, load=1.0, joined_s=0.002) for sharing in (2, 9))
    assert few.longer_s(1, few.in_turn(0.1)) == pytest.approx(0.002 + 3 * 0.001)
    assert many.longer_s(1, many.in_turn(0.1)) == pytest.approx(0.002 + 0.004 + 0.001)
    assert few._replace(load=0.0).longer_s(2, few._replace(load=0.0).in_turn(1e6)) == pytest.approx(0.004)


def test_announced_speeds_give_the_cost_of_a_second_position() -> None:
    cost = RowCost.of_speeds(10, 1000.0, 5000.0, 1250.0, sharing=3)
    assert cost == pytest.approx((0.008, 0.002, 3, 0.0, 1.0, 0.004))
    assert RowCost.of_speeds(10, 1000.0, 5000.0).joined_s == 0.0, "older versions announce no pairs"
    assert RowCost.of_speeds(10, 1000.0, 5000.0, 1e17).joined_s == 0.0
    assert busiest([cost, RowCost(0.001, 0.004)]).hops == pytest.approx(1.5)


@pytest.mark.parametrize("pair_units_per_s", [5e-324, 1e-9, 1e18])
def test_false_costs_of_a_hop_break_nothing(pair_units_per_s: float) -> None:
    cost = RowCost.of_speeds(10, 1000.0, 5000.0, pair_units_per_s, sharing=3)
    one = budget(busiest([cost, RowCost(0.001, 0.004)]), turn_s=0.1, acceptance=0.9)
    assert (one.window() > PROBE, one.worthwhile([1.0]) == 1) == (pair_units_per_s > 1, pair_units_per_s > 1)


def test_only_guesses_that_are_worth_their_rows_are_sent() -> None:
    one = MeasuredBudget(lambda: RowCost(0.004, 0.001, hops=3.0, joined_s=0.005))
    assert one.worthwhile([0.1, 0.01]) == 2, "no turn is measured"
    one.turn(0.09)
    assert one.worthwhile([]) == 0
    assert one.worthwhile([0.15]) == 0, "18 of 90 ms for a sixth of a turn"
    assert one.worthwhile([0.3]) == 1
    assert one.worthwhile([0.15, 0.14]) == 2, "together they are worth a pass"
    assert one.worthwhile([0.9, 0.5, 0.02, 0.01]) == 2
    busy = MeasuredBudget(lambda: RowCost(0.004, 0.001, 9, 0.5, hops=3.0, joined_s=0.005))
    busy.turn(0.09)
    assert busy.worthwhile([0.9]) == 0, "others lose more"


def test_the_cost_of_rows_is_asked_for_now_and_then() -> None:
    asked = []

    def cost() -> RowCost:
        asked.append(1)
        return RowCost(0.004, 0.001)

    one = MeasuredBudget(cost)
    for _ in range(100):
        one.turn(0.05)
        one.count(0)
        one.verdict("lookup", 1, 0)
    assert 10 <= len(asked) <= 14, "each half second"


def test_the_load_of_a_device() -> None:
    load = RowLoad()
    for number in range(1, 2001):
        load.record(number * 0.01, 0.004)
    assert load.share(20.0) == pytest.approx(0.4, rel=0.02)
    assert load.share(20.0 + OVER_S) == pytest.approx(0.4 / math.e, rel=0.02)
    assert load.share(200.0) < 1e-6
    for number in range(1, 2001):
        load.record(200 + number * 0.01, 0.01)
    assert load.share(220.0) == pytest.approx(1.0, rel=0.02)


def test_guesses_go_in_batches() -> None:
    sure = budget(RowCost(0.002, 0.001), turn_s=0.15, acceptance=0.98)
    window = sure.window()
    assert sure.count(0) == window
    assert sure.count(window) == 0
    assert sure.count(window - 1) == 0 < batch(window) - 1
    assert sure.count(window - batch(window)) == batch(window)
    assert sure.count(window + 5) == 0


def test_a_session_without_gain_rests_longer_and_longer() -> None:
    one = MeasuredBudget(lambda: RowCost(0.002, 0.002))
    retries = []
    for turn in range(5000):
        one.turn(0.01)
        if count := one.count(0):
            assert count <= MAX_WINDOW
            retries.append(turn)
            one.verdict("lookup", 0, count)
    assert retries, "it must try at all"
    gaps = [later - sooner for sooner, later in itertools.pairwise(retries)]
    rests = [gap for gap in gaps if gap > 1]
    assert rests[0] >= FIRST_REST - 1
    assert rests == sorted(rests)
    assert rests[-1] <= LONGEST_REST
    assert len(retries) < 30


def test_a_retry_that_succeeds_goes_on() -> None:
    one = MeasuredBudget(lambda: RowCost(0.002, 0.002))
    one.turn(0.05)
    for _ in range(40):
        one.verdict("lookup", 0, 3)
    assert one.count(0) == 0
    for _ in range(LONGEST_REST):
        one.turn(0.05)
    for _ in range(30):
        one.turn(0.05)
        if count := one.count(0):
            one.verdict("lookup", count, 0)
    assert one.window() > PROBE
    assert one.proposer("lookup").rest == FIRST_REST


def test_proposers_are_judged_apart() -> None:
    one = MeasuredBudget(lambda: RowCost(0.001, 0.001))
    one.turn(0.1)
    for _ in range(20):
        one.verdict("model", 0, 4)
        one.verdict("lookup", 4, 0)
    assert one.proposer("model").acceptance < 0.2 < 0.9 < one.proposer("lookup").acceptance
    assert one.worth("lookup") > one.worth("model")
    assert one.window() == one.window("lookup") > one.window("model")


def test_a_slow_proposer_is_worth_less() -> None:
    one = MeasuredBudget(lambda: RowCost(0.001, 0.001))
    one.turn(0.05)
    one.proposer("lookup").acceptance = one.proposer("model").acceptance = 0.8
    one.proposer("model").took(4, 0.2)
    assert one.worth("lookup") > one.worth("model")
