"""What a step is expected to take."""

from __future__ import annotations

import math

import numpy as np
import pytest

from swarmnode.plan.training.expected_step import LONGEST_S, ExpectedStep, passing_s
from swarmnode.plan.training.rehearsal import PLAYED
from swarmnode.plan.training.transfers import Transfers
from swarmnode.plan.training.wiring import Replica
from swarmnode.plan.view import Span


def links(peers: str, *, delay_s: float = 0.0, sending_s: float = 0.0) -> Transfers:
    transfers = Transfers()
    apart = 1 - np.eye(len(peers))
    transfers.know(list(peers), delay_s * apart, sending_s * apart)
    return transfers


def test_one_stage_computes_one_microbatch_after_another() -> None:
    assert passing_s(4, {"a": Replica(Span(0, 4), 0.1)}, links("a"), 10) == pytest.approx(4.0)


def test_a_pipeline_takes_the_beat_of_its_slowest_stage_and_the_way_of_one() -> None:
    workers = {"a": Replica(Span(0, 2), 0.1), "b": Replica(Span(2, 4), 0.3)}
    assert passing_s(4, workers, links("ab"), 10) == pytest.approx(10 * 0.6 + 0.2)


def test_replicas_share_the_work_by_their_speeds_and_many_go_the_ways_of_few() -> None:
    workers = {"a": Replica(Span(0, 4), 0.1), "b": Replica(Span(0, 4), 0.3)}
    count = 20 * PLAYED
    assert passing_s(4, workers, links("ab"), count) == pytest.approx(count * 0.3, rel=0.05)


def test_a_slow_link_or_a_long_one_decides() -> None:
    workers = {"a": Replica(Span(0, 2), 0.001), "b": Replica(Span(2, 4), 0.001)}
    assert passing_s(4, workers, links("ab", sending_s=1.0), 10) == pytest.approx(10, rel=0.2)
    assert passing_s(4, workers, links("ab", delay_s=3.0), 30) == pytest.approx(6, rel=0.1), "all are under way at once"


def test_what_is_booked_now_counts_for_nothing_and_stays() -> None:
    busy, transfers = Replica(Span(0, 4), 0.1, booked_units=400, in_flight=9), links("ab")
    transfers.book(["a", "b"], 5)
    assert passing_s(4, {"a": busy}, transfers, 10) == pytest.approx(4.0)
    assert busy.booked_units == 400 and busy.in_flight == 9 and transfers.busiest_s() == 0.0


def test_nothing_is_expected_where_units_have_nobody() -> None:
    assert passing_s(4, {"a": Replica(Span(0, 2), 0.1)}, links("a"), 10) == 0.0
    assert passing_s(4, {}, links(""), 10) == 0.0


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


def test_room_for_few_microbatches_at_once_is_waited_for() -> None:
    workers = {"a": Replica(Span(0, 2), 0.1, window=1), "b": Replica(Span(2, 4), 0.1, window=9)}
    assert passing_s(4, workers, links("ab"), 10) == pytest.approx(10 * 0.4)


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
