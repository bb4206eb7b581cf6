"""Leases that are out, and those being called back."""

from __future__ import annotations

from swarmnode.plan.view import Span
from swarmnode.roles.training.grants import Grant, Grants

ROUTE = (("a", Span(0, 1)), ("b", Span(1, 2)))


def grants_out(*leases: int) -> Grants:
    grants = Grants()
    for lease in leases:
        grants.add(Grant(lease, lease % 10, ROUTE))
    return grants


def test_a_grant_is_done_once() -> None:
    grants = grants_out(11)
    assert grants.numbers == {1} and len(grants) == 1
    done = grants.done(11)
    assert done is not None and done.number == 1
    assert grants.done(11) is None and not len(grants) and grants.numbers == set()


def test_a_number_is_free_when_all_stages_have_released_it() -> None:
    grants = grants_out(11, 12)
    grants.call_back(11, {"a", "b"})
    assert [grant.lease for grant in grants] == [12], "it is not out any more"
    assert grants.done(11) is None, "what comes late is not done"
    grants.released(11, "a")
    assert grants.numbers == {1, 2} and len(grants) == 2
    grants.released(11, "b")
    assert grants.numbers == {2} and len(grants) == 1


def test_a_lost_stage_is_not_waited_for() -> None:
    grants = grants_out(11, 12)
    grants.call_back(11, {"a", "b"})
    grants.call_back(12, {"b"})
    grants.lose("b")
    assert grants.numbers == {1}
    grants.lose("a")
    assert not len(grants)


def test_nobody_to_ask() -> None:
    grants = grants_out(11)
    grants.call_back(11, set())
    assert not len(grants) and repr(grants) == "<Grants 0 out, 0 called back>"


def test_words_about_leases_of_before_are_nothing() -> None:
    grants = grants_out(11)
    grants.call_back(11, {"a"})
    grants.clear()
    grants.released(11, "a")
    assert not len(grants)
