"""Delays between peers: what was measured counts before what coordinates say, and that before the median."""

from __future__ import annotations

import pytest

from swarmnode.net.measuring.coordinate import Coordinate
from swarmnode.plan.routes.delays import bandwidths, one_way_delays
from swarmnode.plan.routes.routing import find_route
from swarmnode.plan.view import PeerView, Span, View, view_of
from swarmnode.swarm.records.announcement import VERSION, Announcement, State, peer_digest

HERE, NEAR, FAR = (
    Coordinate((0.0, 0, 0), 1.0, 0.1),
    Coordinate((10.0, 0, 0), 2.0, 0.1),
    Coordinate((0.0, 200, 0), 1.0, 0.1),
)


def test_measured_then_coordinates_then_the_median():
    view = View(4, (), {("a", "b"): 0.4, ("x", "y"): 0.06, ("x", "z"): 0.06}, {"a": HERE, "b": NEAR, "c": FAR})
    delay_s = one_way_delays(view, ["a", "b", "c", "d", None])
    assert delay_s[0, 1] == delay_s[1, 0] == pytest.approx(0.2), "measured, whatever the coordinates say"
    assert delay_s[0, 2] == delay_s[2, 0] == pytest.approx((200 + 1 + 1) / 2e3)
    assert delay_s[0, 3] == delay_s[3, 4] == pytest.approx(0.03), "nobody knows where d is: the median"


def test_nobody_with_a_coordinate():
    assert one_way_delays(View(1, ()), ["a", None]).tolist() == [[0.025, 0.025], [0.025, 0.025]]


def test_a_route_prefers_the_replica_that_coordinates_call_near():
    peers = (
        PeerView("first", Span(0, 2), decode_units_per_s=100),
        *(PeerView(name, Span(2, 4), decode_units_per_s=100) for name in ("near", "far")),
    )
    for near, far in ((NEAR, FAR), (FAR, NEAR)):
        places = {"client": HERE, "first": HERE, "near": near, "far": far}
        route = find_route(View(4, peers, {}, places), client="client")
        assert route.hops[1].peer == ("near" if near is NEAR else "far")


def test_announcements_bring_coordinates_and_the_observer_its_own():
    def announce(peer: str, **fields: object) -> Announcement:
        return Announcement(VERSION, bytes(32), peer, 1, 0.0, 1.0, 0.0, State.READY, (0, 2), **fields)

    announced = [
        announce("a", coordinate=NEAR.packed(), rtt_us={peer_digest("new"): 7000}),
        announce("new", coordinate=Coordinate().packed()),
        announce("old"),
    ]
    view = view_of(2, announced, observer="me", coordinate=HERE)
    assert set(view.coordinates) == {"a", "me"}, "a coordinate that is all error says nothing"
    assert one_way_delays(view, ["me", "a"])[0, 1] == pytest.approx((10 + 3) / 2e3, rel=0.02)
    assert view.rtt_s == {("a", "new"): 0.007}
    assert not view_of(2, announced, observer="me", coordinate=Coordinate()).coordinates.keys() & {"me"}


def test_of_nobody_nothing_is_known():
    assert bandwidths(View(4, ()), ()).shape == one_way_delays(View(4, ()), ()).shape == (0, 0)
