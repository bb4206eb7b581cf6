"""Whom a client can do without."""

from __future__ import annotations

from swarmnode.plan.routes.routing import ESTABLISHED, dispensable
from swarmnode.plan.view import PeerView, Span, View
from swarmnode.swarm.records.announcement import State

OLD = {"old": 1.0, "also old": ESTABLISHED}


def test_newcomers_are_left_out_while_their_units_have_others() -> None:
    peers = (PeerView("old", Span(0, 4)), PeerView("also old", Span(4, 6)), PeerView("new", Span(2, 6)))
    assert dispensable(View(6, peers), OLD) == {"new"}
    assert dispensable(View(6, peers), {}) == frozenset(), "all are new"
    assert dispensable(View(6, peers), OLD, avoid={"also old"}) == frozenset()


def test_who_alone_holds_a_unit_is_not_left_out() -> None:
    peers = (PeerView("old", Span(0, 4)), PeerView("new", Span(2, 6)), PeerView("newer", Span(0, 2)))
    assert dispensable(View(6, peers), OLD) == {"newer"}
    leaving = (PeerView("old", Span(0, 6), State.DRAINING), PeerView("new", Span(0, 6)))
    assert dispensable(View(6, leaving), OLD) == frozenset()
