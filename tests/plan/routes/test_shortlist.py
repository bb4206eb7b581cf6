import random

import pytest

from swarmnode.errors import NoRoute
from swarmnode.plan.routes.routing import CONSIDERED, find_route, shortlist
from swarmnode.plan.view import PeerView, Span, View
from swarmnode.swarm.records.announcement import State

WHOLE = Span(0, 24)


def crowd(peers, size=6, seed=0):
    chance = random.Random(seed)
    starts = (chance.randrange(0, 24 - size + 1) for _ in range(peers))
    return View(24, tuple(PeerView(f"p{i}", Span(s, s + size), decode_units_per_s=100.0) for i, s in enumerate(starts)))


def test_a_small_swarm_is_left_as_it_is():
    view = crowd(4 * CONSIDERED)
    assert shortlist(view, "client", WHOLE) is view


@pytest.mark.parametrize("size", [2, 6, 24])
def test_of_thousands_a_few_dozen_that_cover_the_model_are_drawn(size):
    view = crowd(5000, size)
    short = shortlist(view, "client", WHOLE)
    assert len(short.peers) <= 8 * CONSIDERED
    assert len({peer.peer for peer in short.peers}) == len(short.peers)
    assert find_route(short, client="client").hops


def test_clients_draw_differently_and_each_the_same_again():
    view = crowd(5000)
    assert shortlist(view, "a", WHOLE) == shortlist(view, "a", WHOLE)
    assert shortlist(view, "a", WHOLE) != shortlist(view, "b", WHOLE)


def test_those_that_hold_a_sessions_cache_stay():
    keep = frozenset({"p4999", "p17"})
    assert keep <= {peer.peer for peer in shortlist(crowd(5000), "a", WHOLE, keep).peers}


def test_rare_units_are_looked_for_as_long_as_it_takes():
    view = crowd(3000, 2)
    others = tuple(peer for peer in view.peers if not peer.span.start <= 10 < peer.span.end)
    rare = PeerView("rare", Span(10, 11), decode_units_per_s=100.0)
    full = View(24, (*others, rare))
    assert any(hop.peer == "rare" for hop in find_route(shortlist(full, "a", WHOLE), client="a").hops)
    draining = View(24, (*others, PeerView("rare", Span(10, 11), State.DRAINING, 100.0)))
    with pytest.raises(NoRoute):
        find_route(shortlist(draining, "a", WHOLE), client="a")
