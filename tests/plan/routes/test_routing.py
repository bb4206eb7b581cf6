import random
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.codec.body import HopSpec
from swarmnode.errors import NoRoute
from swarmnode.plan.routes.routing import RoutingConfig, SessionSize, find_route
from swarmnode.plan.view import PeerView, Span, View
from swarmnode.swarm.records.announcement import State
from tests.work import lines_run

CONFIG = RoutingConfig()


def peer(name, start, end, speed=100.0, state=State.READY, sessions=0):
    return PeerView(name, Span(start, end), state, speed, sessions)


def hops_of(route):
    return [(hop.peer, hop.start, hop.end) for hop in route.hops]


def cost_of(view, hops, *, ring, client):
    """The cost of a route, written down anew from its definition."""
    speeds = {p.peer: p.decode_units_per_s / (1 + CONFIG.load_weight * p.sessions) for p in view.peers}

    def link(a, b):
        if a == b:
            return 0.0
        return view.rtt_s.get((a, b), view.rtt_s.get((b, a), view.default_rtt_s)) / 2

    first, last = hops[0][0], hops[-1][0]
    total = sum((end - start) / speeds[name] for name, start, end in hops)
    total += sum(link(a[0], b[0]) + CONFIG.hop_s for a, b in pairwise(hops))
    if ring:
        return total + link(last, first) + CONFIG.entry_weight * link(client, first)
    return total + link(client, first) + link(client, last)


def all_routes(view):
    """Every way to cut the model among some peers in some order, each peer once."""

    def extend(at, used, hops):
        if at == view.units:
            yield hops
            return
        for candidate in view.peers:
            if candidate.peer not in used and candidate.span.start <= at < candidate.span.end:
                for end in range(at + 1, candidate.span.end + 1):
                    yield from extend(end, used | {candidate.peer}, [*hops, (candidate.peer, at, end)])

    yield from extend(0, frozenset(), [])


@st.composite
def views(draw):
    units = draw(st.integers(1, 6))
    peers = []
    for i in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, units - 1))
        speed = draw(st.sampled_from([20.0, 100.0, 500.0]))
        peers.append(peer(f"p{i}", start, draw(st.integers(start + 1, units)), speed, sessions=draw(st.integers(0, 3))))
    places = {name: draw(st.sampled_from([0.0, 0.0001, 0.01, 0.1])) for name in [p.peer for p in peers] + ["client"]}
    rtts = {(a, b): abs(places[a] - places[b]) + 0.0001 for a, b in combinations(places, 2)}
    return View(units, tuple(peers), rtts)


NEARLY = (
    1.02  # a ring may gain by one unit on a peer that the client reaches sooner: peers change at ends of spans alone
)


@settings(max_examples=300, deadline=None)
@given(views(), st.booleans())
def test_as_good_as_brute_force(view, ring):
    costs = [cost_of(view, hops, ring=ring, client="client") for hops in all_routes(view)]
    if not costs:
        with pytest.raises(NoRoute):
            find_route(view, client="client", ring=ring)
        return
    route = find_route(view, client="client", ring=ring)
    hops = hops_of(route)
    assert len({hop.peer for hop in route.hops}) == len(hops)
    assert route.cost_s == pytest.approx(cost_of(view, hops, ring=ring, client="client"))
    assert min(costs) <= route.cost_s * (1 + 1e-9)
    assert route.cost_s <= min(costs) * NEARLY


def test_missing_units_are_named():
    view = View(9, (peer("a", 0, 3), peer("b", 4, 6), peer("c", 3, 9, state=State.LOADING)))
    with pytest.raises(NoRoute, match=r"layers 3, 6-8 of the model's 9; more machines"):
        find_route(view)


def test_machines_with_the_layers_that_are_left_out_are_not_denied():
    with pytest.raises(
        NoRoute, match=r"with layers 0-1 of the model's 2 can be used: 1 machine failed, could not be reached"
    ):
        find_route(View(2, (peer("a", 0, 2),)), avoid={"a", "b"})
    with pytest.raises(NoRoute, match=r"no machine has layer 2 of the model's 3; more machines"):
        find_route(View(3, (peer("a", 0, 2),)), avoid={"a"})


def test_avoid_and_states():
    view = View(4, (peer("a", 0, 4, 1000), peer("b", 0, 4, 10), peer("c", 0, 4, 9000, State.DRAINING)))
    assert hops_of(find_route(view)) == [("a", 0, 4)]
    assert hops_of(find_route(view, avoid={"a"})) == [("b", 0, 4)]


def test_enters_and_leaves_in_the_middle_of_a_span():
    view = View(6, (peer("a", 0, 4), peer("b", 2, 6)), {("a", "b"): 0.0001})
    assert hops_of(find_route(view)) in ([("a", 0, 4), ("b", 4, 6)], [("a", 0, 2), ("b", 2, 6)])
    fast = View(6, (peer("a", 0, 6, 10), peer("b", 2, 4, 10_000), peer("c", 4, 6, 10)), {("a", "b"): 0.0001})
    assert [hop.peer for hop in find_route(fast).hops][:2] == ["a", "b"]


def test_only_the_middle_of_the_model():
    view = View(6, (peer("a", 0, 3), peer("b", 3, 6)))
    assert hops_of(find_route(view, units=Span(1, 5))) == [("a", 1, 3), ("b", 3, 5)]


def test_near_peers_win():
    view = View(2, (peer("near", 0, 2), peer("far", 0, 2)), {("client", "near"): 0.001, ("client", "far"): 0.2})
    assert hops_of(find_route(view, client="client")) == [("near", 0, 2)]


def test_loaded_peer_is_left_for_an_idle_one():
    view = View(2, (peer("busy", 0, 2, sessions=8), peer("idle", 0, 2)))
    assert hops_of(find_route(view)) == [("idle", 0, 2)]


def test_running_session_stays_with_its_caches():
    view = View(
        6,
        (peer("a", 0, 3, 100), peer("b", 3, 6, 100), peer("c", 0, 3, 200), peer("d", 3, 6, 200), peer("e", 0, 6, 150)),
    )
    keep = [HopSpec("a", 0, 3), HopSpec("b", 3, 6)]
    assert hops_of(find_route(view, retain=keep)) == [("a", 0, 3), ("b", 3, 6)]
    assert hops_of(find_route(view, retain=keep, avoid={"b"})) == [("a", 0, 3), ("d", 3, 6)]
    assert hops_of(find_route(view, retain=keep, avoid={"a", "b"}))[0][0] in ("c", "e")


def test_keeper_takes_over_where_nobody_else_can():
    view = View(6, (peer("a", 0, 6),))
    keep = [HopSpec("a", 0, 3), HopSpec("b", 3, 6)]
    assert hops_of(find_route(view, retain=keep)) == [("a", 0, 6)]


@pytest.mark.parametrize(("speed", "taken"), [(100.0, "same"), (101.5, "same"), (103.0, "other"), (200.0, "other")])
def test_a_lost_hop_is_replaced_by_a_peer_with_its_bits_unless_another_is_over_two_percent_faster(speed, taken):
    peers = (peer("a", 0, 3), peer("same", 3, 6, 100.0), peer("other", 3, 6, speed))
    view = View(6, peers, {(one.peer, two.peer): 0.0 for one, two in combinations(peers, 2)})
    keep = [HopSpec("a", 0, 3), HopSpec("lost", 3, 6)]
    for client in ("one", "two", "three", "four"):
        route = find_route(view, client=client, retain=keep, alike={"same"}, ring=False)
        assert hops_of(route) == [("a", 0, 3), (taken, 3, 6)]


def test_clients_spread_over_equal_peers_and_each_is_constant():
    view = View(2, tuple(peer(f"p{i}", 0, 2) for i in range(4)))
    chosen = {client: find_route(view, client=client).hops[0].peer for client in map(str, range(40))}
    assert len(set(chosen.values())) == 4
    assert all(find_route(view, client=client).hops[0].peer == first for client, first in chosen.items())


@pytest.mark.parametrize("measured", [0, 12])
def test_a_route_among_two_hundred_peers_is_little_work(measured):
    chance = random.Random(3)
    peers = []
    for i in range(200):
        start = chance.randrange(0, 75, 5)
        peers.append(peer(f"p{i}", start, min(82, start + 12), chance.uniform(50, 2000), sessions=chance.randrange(4)))
    rtts = {
        (f"p{i}", f"p{chance.randrange(200)}"): chance.uniform(0.001, 0.2) for i in range(200) for _ in range(measured)
    }
    view = View(82, tuple(peers), rtts)
    find_route(view)  # what is worked out once for a view is not counted
    for client in "012":
        assert lines_run(lambda client=client: find_route(view, client=client)) < 50_000  # 5 ms


def test_a_session_keeps_away_from_peers_without_room_for_it():
    full = PeerView("full", Span(0, 4), decode_units_per_s=200.0, cache_tokens_free=99)
    view = View(4, (full, peer("slower", 0, 4)))
    assert hops_of(find_route(view)) == [("full", 0, 4)], "nothing is known of the session"
    assert hops_of(find_route(view, size=SessionSize(60, 39))) == [("full", 0, 4)]
    assert hops_of(find_route(view, size=SessionSize(60, 40))) == [("slower", 0, 4)]


def test_a_peer_without_room_is_asked_where_there_is_no_other():
    full = PeerView("full", Span(0, 2), cache_tokens_free=0)
    assert hops_of(find_route(View(4, (full, peer("b", 2, 4))), size=SessionSize(1, 1))) == [
        ("full", 0, 2),
        ("b", 2, 4),
    ]


def test_a_running_session_has_its_room_already():
    full = PeerView("full", Span(0, 4), cache_tokens_free=0)
    keep = (HopSpec("full", 0, 4),)
    view = View(4, (full, peer("other", 0, 4)))
    assert hops_of(find_route(view, retain=keep, size=SessionSize(1, 100))) == [("full", 0, 4)]


def test_a_long_prompt_goes_where_prompts_are_fast():
    quick_tokens = PeerView("quick tokens", Span(0, 4), decode_units_per_s=100.0, prefill_units_per_s=500.0)
    quick_prompts = PeerView("quick prompts", Span(0, 4), decode_units_per_s=80.0, prefill_units_per_s=8000.0)
    view = View(4, (quick_tokens, quick_prompts))
    assert hops_of(find_route(view, size=SessionSize(10, 100))) == [("quick tokens", 0, 4)]
    assert hops_of(find_route(view, size=SessionSize(4000, 100))) == [("quick prompts", 0, 4)]


def guesser(name, start, end, speed=100.0, model="small"):
    return PeerView(name, Span(start, end), decode_units_per_s=speed, draft_model=model)


@pytest.mark.parametrize(
    ("proposer", "speed", "first"),
    [
        ("auto", 85.0, "guesser"),
        ("small", 85.0, "guesser"),
        ("auto", 20.0, "plain"),
        ("other", 85.0, "plain"),
        ("lookup", 85.0, "plain"),
        ("", 85.0, "plain"),
    ],
)
def test_a_first_hop_with_the_wanted_draft_model_may_be_a_little_slower(proposer, speed, first):
    view = View(4, (peer("plain", 0, 3), guesser("guesser", 0, 3, speed), peer("last", 3, 4)))
    assert find_route(view, size=SessionSize(1, 100, proposer)).hops[0].peer == first


def test_only_the_first_hop_is_chosen_for_its_draft_model():
    view = View(4, (peer("first", 0, 2), guesser("guesser", 2, 4, 85.0), peer("plain", 2, 4)))
    assert hops_of(find_route(view, size=SessionSize(1, 100, "auto"))) == [("first", 0, 2), ("plain", 2, 4)]


def of_group(name, start, end, group, speed=100.0):
    return PeerView(name, Span(start, end), decode_units_per_s=speed, group=group)


def test_ids_of_one_address_group_are_not_two_hops_of_a_route():
    sybils = [of_group(f"s{i}", i % 3 * 2, i % 3 * 2 + 2, "203.0.113.0/24", speed=1e6) for i in range(9)]
    honest = [of_group(f"h{i}", i * 2, i * 2 + 2, f"198.51.{i}.0/24") for i in range(3)]
    route = find_route(View(6, (*sybils, *honest)), client="client")
    assert sum(hop.peer.startswith("s") for hop in route.hops) == 1


def test_where_only_one_group_holds_some_units_it_has_several_hops():
    sybils = [of_group(f"s{i}", i * 2, i * 2 + 2, "203.0.113.0/24") for i in range(3)]
    assert len(find_route(View(6, tuple(sybils)), client="client").hops) == 3
    at_home = [peer(f"p{i}", i * 2, i * 2 + 2) for i in range(3)]  # of no group of the open internet
    assert len(find_route(View(6, tuple(at_home)), client="client").hops) == 3
