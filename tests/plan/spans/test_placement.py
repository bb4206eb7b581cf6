import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.plan.spans.span_placement import Joiner, MovePolicy, choose_span, gaps, reconsider
from swarmnode.plan.view import PeerView, Span, View
from swarmnode.swarm.records.announcement import State
from tests.work import lines_run


def peer(name, start, end, state=State.READY, speed=100.0, **more):
    return PeerView(name, Span(start, end), state, speed, **more)


def join(view, name, capacity, speed=100.0, started_at=1e9):
    return choose_span(view, Joiner(name, capacity, speed, started_at))


def test_alone_with_room_takes_the_whole_model():
    assert join(View(6, ()), "a", 100) == (0, 6)


def test_fills_the_gap():
    view = View(6, (peer("a", 0, 2), peer("b", 4, 6)))
    assert join(view, "c", 2) == (2, 4)
    assert join(view, "c", 3) in [(1, 4), (2, 5)]


def test_leaves_gaps_that_few_peers_can_fill():
    for i in range(20):
        assert join(View(6, ()), f"peer {i}", 2).start in (0, 2, 4)
        assert join(View(8, ()), f"peer {i}", 4).start in (0, 4)


def test_strengthens_the_weakest_units():
    view = View(6, (peer("a", 0, 3, speed=1000), peer("b", 3, 6, speed=10)))
    assert join(view, "c", 3) == (3, 6)


def test_noise_in_speeds_does_not_move_spans_off_alignment():
    view = View(6, (peer("a", 0, 3, speed=101), peer("b", 3, 6, speed=99)))
    assert join(view, "c", 3).start in (0, 3)


def test_draining_and_offline_do_not_count():
    view = View(6, (peer("a", 0, 3), peer("b", 3, 6, State.DRAINING), peer("c", 3, 6, State.OFFLINE)))
    assert join(view, "d", 3) == (3, 6)


def test_two_joiners_do_not_always_draw_alike():
    view = View(6, (peer("a", 0, 3), peer("b", 3, 6)))
    assert {join(view, f"peer {i}", 3) for i in range(10)} == {(0, 3), (3, 6)}


@pytest.mark.parametrize("units", [6, 10, 34])
@pytest.mark.parametrize("peers", [4, 7])
def test_joining_one_after_the_other_covers_everything(units, peers):
    chance = random.Random(units * peers)
    view = View(units, ())
    for i in range(peers):
        capacity = -(-units // 4)
        span = join(view, f"peer {i}", capacity, chance.uniform(50, 500))
        view = replace(view, peers=(*view.peers, peer(f"peer {i}", *span)))
        if i == 3:
            assert gaps(units, view.peers) == []


@settings(max_examples=60, deadline=None)
@given(st.integers(3, 40), st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(0, 1000))
def test_joining_together_agrees_after_one_look(units, capacities, seed):
    """All choose blindly, then all see all claims and choose again: this is final, and as if they had come in turn."""
    joiners = [Joiner(f"{seed} {i}", capacity, 100.0 + i, i // 2) for i, capacity in enumerate(capacities)]
    view = View(units, ())
    for _ in range(3):
        spans = [choose_span(view, joiner) for joiner in joiners]
        before, view = (
            view,
            View(
                units,
                tuple(
                    peer(joiner.peer, *span, State.JOINING, joiner.decode_units_per_s, started_at=joiner.started_at)
                    for joiner, span in zip(joiners, spans, strict=True)
                ),
            ),
        )
    assert view == before
    if sum(min(capacity, units) for capacity in capacities) >= units and len(set(capacities)) == 1:
        assert gaps(units, view.peers) == []


def move(view, name, capacity, speed=100.0):
    return reconsider(view, Joiner(name, capacity, speed, 0))


def test_replica_moves_into_the_gap():
    view = View(6, (peer("a", 0, 3), peer("b", 0, 3)))  # the holder of [3:6) just died
    moves = [move(view, name, 3) for name in "ab"]
    assert [found.span for found in moves] == [(3, 6), (3, 6)]
    assert all(found.fills for found in moves)
    assert sorted(found.delay_s > 0 for found in moves) == [False, True], "exactly one goes at once"


def test_the_only_holder_stays():
    view = View(6, (peer("a", 0, 3), peer("b", 3, 5)))
    assert move(view, "a", 3) is None
    assert move(view, "b", 2) is None, "unit 3 would be left alone"


def test_who_leaves_a_smaller_gap_behind_goes():
    view = View(8, (peer("a", 0, 1), peer("b", 1, 4)))  # [4:8) has nobody: b fills three and leaves three
    assert move(view, "b", 3) is None
    assert move(view, "b", 4).span == (4, 8)


def test_partly_redundant_peer_shifts_to_cover_all():
    view = View(8, (peer("a", 0, 4), peer("c", 2, 6)))  # [4:8) was b's
    assert move(view, "c", 4).span == (4, 8)
    assert move(view, "c", 4).delay_s == 0
    assert move(view, "a", 4) is None


def test_somebody_is_loading_it_already():
    view = View(6, (peer("a", 0, 3), peer("b", 0, 3), peer("c", 3, 6, State.LOADING)))
    assert move(view, "c", 3) is None
    found = move(view, "a", 3)
    assert found is None or not found.fills


def test_a_move_for_throughput_must_pay_for_itself():
    view = View(6, (peer("a", 0, 3), peer("b", 0, 3), peer("d", 3, 6, speed=150)))  # 50 tokens/s; 33 without a
    quick, slow = MovePolicy(move_s=10, stay_s=1000), MovePolicy(move_s=1000, stay_s=10)
    found = reconsider(view, Joiner("a", 3, 100, 0), quick)
    assert found.span.end > 3 and 0 < found.gain < 0.2 and not found.fills
    assert reconsider(view, Joiner("a", 3, 100, 0), slow) is None


def test_a_peer_that_adds_nothing_loses_nothing_by_moving():
    view = View(6, (peer("a", 0, 3), peer("b", 0, 3), peer("c", 0, 3), peer("d", 3, 6)))
    slow = MovePolicy(move_s=1e6, stay_s=1)
    assert reconsider(view, Joiner("a", 3, 100, 0), slow).span.end > 3


def test_peers_do_not_wait_equally_long_to_move():
    peers = tuple(peer(f"p{i}", 0, 3) for i in range(6))
    view = View(6, (*peers, peer("d", 3, 6)))
    assert len({round(move(view, f"p{i}", 3).delay_s, 3) for i in range(6)}) == 6


def test_the_only_holder_does_not_move_for_throughput():
    view = View(6, (peer("a", 0, 4, speed=1000), peer("b", 2, 6, speed=10)))
    assert move(view, "a", 4, speed=1000) is None, "units 0 and 1 would have nobody while it loads"


def test_nobody_moves_at_rest():
    view = View(6, (peer("a", 0, 3), peer("b", 3, 6), peer("c", 0, 3), peer("d", 3, 6)))
    assert [move(view, name, 3) for name in "abcd"] == [None] * 4


def test_a_large_view_is_little_work():
    chance = random.Random(1)
    peers = []
    for i in range(200):
        start = chance.randrange(74)
        peers.append(peer(f"p{i}", start, start + 8, speed=chance.uniform(10, 1000)))
    view = View(82, tuple(peers))
    assert lines_run(lambda: choose_span(view, Joiner("me", 8, 100, 0))) < 100_000  # some 10 ms
