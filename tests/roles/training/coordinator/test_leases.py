"""Leases that are out, and those being called back."""

from __future__ import annotations

from swarmnode.plan.view import Span
from swarmnode.roles.training.coordinator.leases import OutstandingLease, OutstandingLeases

ROUTE = (("a", Span(0, 1)), ("b", Span(1, 2)))
FEEDER = "feeder"


def leases_out(*numbers: int) -> OutstandingLeases:
    leases = OutstandingLeases()
    for number in numbers:
        leases.add(OutstandingLease(number, number % 10, ROUTE, FEEDER))
    return leases


def call_back(leases: OutstandingLeases, number: int, *peers: str) -> None:
    found = leases.find(number, FEEDER)
    assert found is not None
    leases.call_back(found, set(peers))


def test_a_lease_is_its_trainers_and_done_once() -> None:
    leases = leases_out(11)
    assert leases.numbers == {1} and len(leases.held_by(FEEDER)) == 1 and not leases.held_by("another")
    assert leases.find(11, "another") is None
    done = leases.find(11, FEEDER)
    assert done is not None and done.number == 1 and done.passes("a") and not done.passes("c")
    leases.done(done)
    assert leases.find(11, FEEDER) is None and not len(leases) and leases.numbers == set()


def test_a_number_is_free_when_all_stages_have_released_it() -> None:
    leases = leases_out(11, 12)
    call_back(leases, 11, "a", "b")
    assert [lease.lease for lease in leases.out] == [12], "it is not out any more"
    assert leases.find(11, FEEDER) is None, "what comes late is not done"
    assert leases.released(11, "a") is None
    assert leases.numbers == {1, 2} and len(leases) == 2
    over = leases.released(11, "b")
    assert over is not None and over.number == 1
    assert leases.numbers == {2} and len(leases) == 1


def test_nobody_to_ask() -> None:
    leases = leases_out(11)
    call_back(leases, 11)
    assert not len(leases) and repr(leases) == "<OutstandingLeases 0 out, 0 called back>"


def test_words_about_leases_of_before_are_nothing() -> None:
    leases = leases_out(11)
    call_back(leases, 11, "a")
    leases.clear()
    assert leases.released(11, "a") is None and not len(leases)
