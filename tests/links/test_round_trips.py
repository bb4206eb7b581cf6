"""Which answers are timed, and what the round trip is then taken for."""

from __future__ import annotations

import pytest

from swarmnode.codec.frames import MAX_SEQ
from swarmnode.links.link_statistics import RoundTrips
from tests.watch import Watch


@pytest.fixture
def clock() -> Watch:
    return Watch(50.0)


def answered(trips: RoundTrips, clock: Watch, takes_s: float) -> float | None:
    number = trips.ping()
    clock.now_s += takes_s
    return trips.pong(number)


def test_it_falls_at_once_and_rises_slowly(clock: Watch) -> None:
    trips = RoundTrips(clock)
    assert trips.rtt_s is None and not trips.begun
    assert answered(trips, clock, 0.1) == pytest.approx(0.1) == trips.rtt_s
    assert answered(trips, clock, 1.1) == pytest.approx(1.1)
    assert trips.rtt_s == pytest.approx(0.8 * 0.1 + 0.2 * 1.1)
    answered(trips, clock, 0.05)
    assert trips.rtt_s == pytest.approx(0.05)


def test_an_answer_to_nothing_measures_nothing(clock: Watch) -> None:
    trips = RoundTrips(clock)
    assert trips.pong(0) is None and trips.rtt_s is None


def test_of_pings_that_overtake_their_answers_the_first_is_timed(clock: Watch) -> None:
    trips = RoundTrips(clock)
    first = trips.ping()
    clock.now_s += 0.4
    second = trips.ping()
    clock.now_s += 0.4
    assert trips.pong(first) == pytest.approx(0.8)
    assert trips.pong(second) is None and trips.rtt_s == pytest.approx(0.8)
    assert trips.pong(first) is None, "an answer counts once"


def test_behind_a_large_payload_only_a_shorter_time_counts(clock: Watch) -> None:
    trips = RoundTrips(clock)
    answered(trips, clock, 0.1)
    for takes_s, known_s in [(2.0, 0.1), (0.06, 0.06)]:
        number = trips.ping(queued_bytes=1 << 20)
        clock.now_s += takes_s
        trips.pong(number)
        assert trips.rtt_s == pytest.approx(known_s)
    trips.ping()
    trips.ping(queued_bytes=1 << 20)  # not timed; the next one may queue behind the same payload
    clock.now_s += 0.05
    trips.pong(trips._timed_ping)
    assert answered(trips, clock, 2.0) is None and trips.rtt_s == pytest.approx(0.05)


def test_numbers_fit_into_a_frame(clock: Watch) -> None:
    trips = RoundTrips(clock)
    trips._ping = MAX_SEQ
    assert trips.ping() == 1
