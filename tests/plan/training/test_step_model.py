"""A step played through, beside what it takes by hand; and what is learnt of it from the steps before."""

from __future__ import annotations

import math

import numpy as np
import pytest

from swarmnode.plan.training.step_forecast import FULL_PLAY, LONGEST_S, ExpectedStep, passing_s
from swarmnode.plan.training.wiring import Replica, Transfers
from swarmnode.plan.view import Span
from tests.plan.training.lines import links


def test_one_stage_computes_one_microbatch_after_another() -> None:
    assert passing_s(4, {"a": Replica(Span(0, 4), 0.1)}, links("a"), 10) == pytest.approx(4.0)


def test_a_pipeline_fills_and_empties_around_its_slowest_stage() -> None:
    """The last stage does all of its own, and waits for the first one's first third of a microbatch; at the end the first stage's
    way back is left."""
    workers = {"a": Replica(Span(0, 2), 0.1), "b": Replica(Span(2, 4), 0.3)}
    assert passing_s(4, workers, links("ab"), 10) == pytest.approx(0.2 / 3 + 10 * 0.6 + 2 / 3 * 0.2)


def test_replicas_do_whole_microbatches() -> None:
    """Of three two take two and one: no share of one in the mean."""
    workers = {"a": Replica(Span(0, 4), 0.25), "b": Replica(Span(0, 4), 0.25)}
    assert passing_s(4, workers, links("ab"), 3) == pytest.approx(2.0)


def test_a_long_way_is_waited_for_once_and_a_slow_line_by_every_microbatch() -> None:
    workers = {"a": Replica(Span(0, 2), 0.001), "b": Replica(Span(2, 4), 0.001)}
    assert passing_s(4, workers, links("ab", delay_s=3.0), 10) == pytest.approx(6.0, rel=0.01)
    assert passing_s(4, workers, links("ab", sending_s=1.0), 10) == pytest.approx(10 + 1.0, rel=0.01)


def test_who_shares_a_line_takes_turns() -> None:
    """Two at one place hand on to two at another, and take gradients back: side by side, or over one line each way. What goes to
    different peers is sent in turns, a quarter of a message each: so the last four arrive at 7.25, 7.5, 7.75 and 8 s, and of the
    last gradient's quarters all but the first wait for others'."""
    workers = {peer: Replica(Span(0, 2) if peer in "ab" else Span(2, 4), 0.001) for peer in "abcd"}
    sending_NN, apart = np.full((4, 4), 1.0), np.zeros((4, 4))
    each, shared = Transfers(), Transfers()
    each.know("abcd", apart, sending_NN)
    shared.know("abcd", apart, sending_NN, (0, 0, 1, 1))
    assert passing_s(4, workers, each, 8) == pytest.approx(4 + 1, rel=0.01)
    assert passing_s(4, workers, shared, 8) == pytest.approx(8 + 1 + 0.75, rel=0.01)
    assert passing_s(4, workers, shared, 1) == pytest.approx(1 + 1, rel=0.01), "one alone has the line to itself"


def test_more_microbatches_take_what_those_in_the_middle_take() -> None:
    workers = {"a": Replica(Span(0, 2), 0.1), "b": Replica(Span(2, 4), 0.3)}
    assert passing_s(4, workers, links("ab"), 10 * FULL_PLAY) == pytest.approx(0.2 + 10 * FULL_PLAY * 0.6)


def test_what_is_booked_stays_and_room_for_few_is_kept_to() -> None:
    busy = Replica(Span(0, 4), 0.1, booked_units=400, in_flight=9)
    assert passing_s(4, {"a": busy}, links("a"), 10) == pytest.approx(4.0)
    assert (busy.booked_units, busy.in_flight, busy.at_once) == (400, 9, 0)
    narrow = {"a": Replica(Span(0, 2), 0.1, window=1), "b": Replica(Span(2, 4), 0.1, window=9)}
    assert passing_s(4, narrow, links("ab"), 10) == pytest.approx(10 * 0.4)


def test_where_units_have_nobody_it_never_ends() -> None:
    assert passing_s(4, {"a": Replica(Span(0, 2), 0.1)}, links("a"), 10) == math.inf
    assert passing_s(4, {}, links(""), 10) == math.inf


def test_replicas_share_the_work_by_their_speeds_and_many_go_the_ways_of_few() -> None:
    workers = {"a": Replica(Span(0, 4), 0.1), "b": Replica(Span(0, 4), 0.3)}
    count = 5 * FULL_PLAY
    assert passing_s(4, workers, links("ab"), count) == pytest.approx(count * 0.3, rel=0.05)


def test_a_slow_link_or_a_long_one_decides() -> None:
    workers = {"a": Replica(Span(0, 2), 0.001), "b": Replica(Span(2, 4), 0.001)}
    assert passing_s(4, workers, links("ab", sending_s=1.0), 10) == pytest.approx(10, rel=0.2)
    assert passing_s(4, workers, links("ab", delay_s=3.0), 30) == pytest.approx(6, rel=0.1), "all are under way at once"


def test_what_is_booked_now_counts_for_nothing_and_stays() -> None:
    busy, transfers = Replica(Span(0, 4), 0.1, booked_units=400, in_flight=9), links("ab", sending_s=1.0)
    transfers.book(["a", "b"], 5)
    assert passing_s(4, {"a": busy}, transfers, 10) == pytest.approx(4.0)
    assert busy.booked_units == 400 and busy.in_flight == 9 and transfers.busy_s("a") == 5.0


def test_forecasts_are_corrected_by_the_median_of_the_last_steps() -> None:
    expected = ExpectedStep()
    expected.begin(2.0)
    assert expected.expected_s == 2.0, "nothing is known better"
    for step_s in (3.0, 3.0, 30.0, 3.0):  # once the machine slept
        expected.end(step_s)
        expected.begin(2.0)
    assert expected.expected_s == pytest.approx(3.0)
    expected.begin(0.0)
    expected.end(5.0)
    assert expected.expected_s == 0.0 and expected.correction == pytest.approx(1.5), (
        "of what nothing was forecast nothing is learnt"
    )


def test_a_step_teaches_by_what_is_known_when_it_is_over() -> None:
    expected = ExpectedStep()
    expected.begin(1.0)  # as stages had estimated it
    for _ in range(2):
        expected.end(3.0, 2.5)  # as they have measured it since
    assert expected.correction == pytest.approx(1.2)
    for nothing in (0.0, math.nan, math.inf):
        again = ExpectedStep()
        again.begin(1.0)
        again.end(3.0, nothing)
        assert again.correction == pytest.approx(2.0)


def test_a_first_step_that_takes_longer_is_half_believed() -> None:
    expected = ExpectedStep()
    expected.begin(2.0)
    expected.end(3.0)  # all warms up
    expected.begin(2.0)
    assert expected.expected_s == pytest.approx(2.5)
    for _ in range(3):
        expected.end(2.0)
        expected.begin(2.0)
    assert expected.expected_s == pytest.approx(2.0)


@pytest.mark.parametrize("forecast_s", [math.inf, math.nan, 1e12, -1.0])
def test_what_a_liar_makes_of_it_is_no_forecast(forecast_s: float) -> None:
    expected = ExpectedStep()
    expected.begin(forecast_s)
    expected.end(2.0)
    assert expected.expected_s == 0.0 and expected.correction == 1.0
    expected.begin(1e-9)
    expected.end(1e9)
    expected.begin(1e7)
    assert expected.expected_s == LONGEST_S
