"""Delays between peers: what was measured counts before what coordinates say, and that before the median."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarmnode.links.link_statistics import Coordinate
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


def towns(path_bps: dict[tuple[str, str], float], up_bps: float = 1e9) -> View:
    """Two of four peers each, 200 ms apart, whose lines were all measured alike."""
    names = [f"{town}{number}" for town in ("a", "b") for number in range(4)]
    peers = tuple(PeerView(name, Span(0, 2), up_bps=up_bps, down_bps=up_bps) for name in names)
    return View(2, peers, {}, {name: HERE if name[0] == "a" else FAR for name in names}, 0, path_bps)


def rates(view: View) -> dict[tuple[str, str], float]:
    names = [peer.peer for peer in view.peers]
    bps_NN = bandwidths(view, names)
    return {
        (one, other): bps_NN[row, column]
        for row, one in enumerate(names)
        for column, other in enumerate(names)
        if row != column
    }


def test_a_link_is_as_fast_as_measured_whatever_lines_say():
    known = rates(towns({("a0", "a1"): 5e9, ("a0", "b0"): 1e7}))
    assert known["a0", "a1"] == 5e9 and known["a0", "b0"] == 1e7
    assert known["a0", "b3"] == 1e7, "its own word of one beside b3"
    assert known["b0", "a0"] == known["a1", "b1"] == 1e9, "nobody else's, and of the way back nothing is known"


def test_two_who_measured_speak_for_their_neighbours_one_does_not():
    known = rates(towns({("a0", "b0"): 1e7, ("a1", "b3"): 2e7, ("a2", "b1"): 1e3}))
    assert known["a3", "b2"] == 1e7, "the median: one liar slows nobody else down"
    assert known["a2", "b0"] == 1e3, "but itself"
    assert known["a3", "a0"] == 1e9, "what is measured between towns says nothing of inside"
    assert rates(towns({("a0", "b0"): 1e7}, up_bps=0.0))["a1", "b1"] == float("inf")


def test_to_whom_nobody_measured_a_link_is_the_usual_one_of_its_sender():
    to_both = {(one, other): bps for one in ("a0", "a1") for other, bps in (("a3", 1e9), ("b0", 1e7), ("b1", 2e7))}
    view = towns(to_both, up_bps=0.0)
    stranger = PeerView("new", Span(0, 2), up_bps=1e18, down_bps=1e18)
    known = rates(replace(view, peers=(*view.peers, stranger), path_bps={**to_both, ("new", "a0"): 1e18}))
    assert known["a0", "new"] == 2e7, "whatever that one says of itself"
    assert known["a2", "new"] == 2e7, "or of those nearby"


def test_what_is_measured_at_home_is_not_usual_of_links_out_of_it():
    view = towns({("a0", "a1"): 1e9, ("a0", "a2"): 1e9, ("a0", "b0"): 1e7}, up_bps=0.0)
    assert rates(view)["a0", "b0"] == 1e7
    stranger = replace(view.peers[-1], peer="new")
    view = replace(view, peers=(*(replace(peer, home=peer.peer[0]) for peer in view.peers), stranger))
    assert rates(view)["a0", "new"] == 1e7


def test_a_link_is_as_long_as_the_one_of_its_ends_says_that_calls_it_longer():
    for rtt_s in ({("a", "b"): 0.4, ("b", "a"): 0.0}, {("b", "a"): 0.0, ("a", "b"): 0.4}):
        assert one_way_delays(View(4, (), rtt_s), ["a", "b"])[0, 1] == 0.2


def test_announcements_bring_paths():
    here = Announcement(VERSION, bytes(32), "a", 1, 0.0, 1.0, 0.0, path_kbps={peer_digest("b"): 8000, bytes(8): 5})
    there = Announcement(VERSION, bytes(32), "b", 1, 0.0, 1.0, 0.0, path_kbps={peer_digest("a"): 0})
    assert view_of(2, [here, there]).path_bps == {("a", "b"): 8e6}
