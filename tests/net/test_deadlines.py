"""Deadlines from measurements, what work is expected to take, and the growing pause."""

from __future__ import annotations

import pytest

from swarmnode.net.clock import Backoff, Deadline, Expectation
from tests.watch import Watch

RULE = Deadline(floor_s=1.0, ceiling_s=20.0, slack=4.0)


def test_a_deadline_is_some_times_what_the_answer_should_take() -> None:
    assert RULE.wait_s(rtt_s=0.1, work_s=0.4) == pytest.approx(2.0)
    assert RULE.wait_s(rtt_s=0.1, work_s=0.4, size_bytes=1_000_000, bytes_per_s=1e6) == pytest.approx(6.0)


def test_a_deadline_has_a_floor_and_a_ceiling() -> None:
    assert RULE.wait_s(rtt_s=0.001) == 1.0
    assert RULE.wait_s(rtt_s=0.1, work_s=1e9) == 20.0


@pytest.mark.parametrize(
    "figures",
    [{"rtt_s": None}, {"rtt_s": 0.1, "work_s": None}, {"rtt_s": 0.1, "size_bytes": 10, "bytes_per_s": None}],
    ids=["round trip", "work", "rate"],
)
def test_what_was_never_measured_gets_the_ceiling(figures: dict[str, float | None]) -> None:
    assert RULE.wait_s(**figures) == 20.0  # type: ignore[arg-type]  # sizes are whole numbers in the table above


@pytest.mark.parametrize("wrong", [{"floor_s": 0.0}, {"floor_s": 30.0, "ceiling_s": 20.0}, {"slack": 0.5}])
def test_a_rule_that_makes_no_sense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="a deadline needs"):
        Deadline(**wrong)


def test_an_expectation_learns_mean_and_deviation() -> None:
    steps = Expectation()
    assert steps.mean is None and steps.bound is None
    for sample in [1.0, 1.2] * 50:
        steps.record(sample)
    assert steps.mean == pytest.approx(1.1, abs=0.02)
    assert steps.bound == pytest.approx(1.5, abs=0.05)
    steps.record(5.0)  # one that is late widens it at once
    assert steps.bound is not None and steps.bound > 4.0


def test_the_pause_grows_to_its_ceiling_and_success_forgives() -> None:
    backoff = Backoff(Watch(100.0), first_s=0.5, ceiling_s=3.0)
    assert [backoff.failed("ann") for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert backoff.pause_s("ann") == 3.0 and backoff.pause_s("bob") == 0.0
    backoff.succeeded("ann")
    assert backoff.pause_s("ann") == 0.0 and backoff.failed("ann") == 0.5


def test_a_pause_ends_by_the_clock_and_is_one_peers_own() -> None:
    clock = Watch(100.0)
    backoff = Backoff(clock, first_s=0.5)
    backoff.failed("ann")
    backoff.failed("bob", at_least_s=4.0)  # it said itself when to come again
    assert backoff.resting == {"ann", "bob"}
    clock.now_s += 0.6
    assert backoff.resting == {"bob"} and backoff.failed("ann") == 1.0


def test_failures_of_long_ago_are_forgotten() -> None:
    clock = Watch(100.0)
    backoff = Backoff(clock, first_s=0.5, forget_s=60.0)
    for _ in range(4):
        backoff.failed("ann")
    clock.now_s += 100.0
    assert backoff.failed("ann") == 0.5
    assert repr(backoff) == "<Backoff from 1 of 1 peers>"
