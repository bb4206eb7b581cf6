"""Leases that are out, and those being called back."""

from __future__ import annotations

from swarmnode.plan.view import Span
from swarmnode.roles.training.coordinator.leases import OutstandingLease, OutstandingLeases

ROUTE = (("a", Span(0, 1)), ("b", Span(1, 2)))


def grants_out(*leases: int) -> OutstandingLeases:
    outstanding_leases = OutstandingLeases()
    for lease in leases:
        outstanding_leases.add(OutstandingLease(lease, lease % 10, ROUTE))
    return outstanding_leases


def test_a_grant_is_done_once() -> None:
    outstanding_leases = grants_out(11)
    assert outstanding_leases.numbers == {1} and len(outstanding_leases) == 1
    done = outstanding_leases.done(11)
    assert done is not None and done.number == 1
    assert outstanding_leases.done(11) is None and not len(outstanding_leases) and outstanding_leases.numbers == set()


def test_a_number_is_free_when_all_stages_have_released_it() -> None:
    outstanding_leases = grants_out(11, 12)
    outstanding_leases.call_back(11, {"a", "b"})
    assert [outstanding.lease for outstanding in outstanding_leases] == [12], "it is not out any more"
    assert outstanding_leases.done(11) is None, "what comes late is not done"
    outstanding_leases.released(11, "a")
    assert outstanding_leases.numbers == {1, 2} and len(outstanding_leases) == 2
    outstanding_leases.released(11, "b")
    assert outstanding_leases.numbers == {2} and len(outstanding_leases) == 1


def test_a_lost_stage_is_not_waited_for() -> None:
    outstanding_leases = grants_out(11, 12)
    outstanding_leases.call_back(11, {"a", "b"})
    outstanding_leases.call_back(12, {"b"})
    outstanding_leases.lose("b")
    assert outstanding_leases.numbers == {1}
    outstanding_leases.lose("a")
    assert not len(outstanding_leases)


def test_nobody_to_ask() -> None:
    outstanding_leases = grants_out(11)
    outstanding_leases.call_back(11, set())
    assert not len(outstanding_leases) and repr(outstanding_leases) == "<OutstandingLeases 0 out, 0 called back>"


def test_words_about_leases_of_before_are_nothing() -> None:
    outstanding_leases = grants_out(11)
    outstanding_leases.call_back(11, {"a"})
    outstanding_leases.clear()
    outstanding_leases.released(11, "a")
    assert not len(outstanding_leases)
