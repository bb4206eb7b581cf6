"""Wiring: a route covers the model, keeps to what is fixed, and shares the work by speed."""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.plan.training.wiring import Replica, Transfers, Wire, book, wire
from swarmnode.plan.view import Span

UNITS = 4
ANYWHERE = [None] * UNITS


def test_one_chain() -> None:
    workers = {"a": Replica(Span(0, 2)), "b": Replica(Span(2, 4))}
    assert wire(workers, ANYWHERE, Transfers()) == [("a", Span(0, 2)), ("b", Span(2, 4))]


def test_nobody_holds_a_unit() -> None:
    assert wire({"a": Replica(Span(0, 3))}, ANYWHERE, Transfers()) is None
    assert wire({}, ANYWHERE, Transfers()) is None


def test_who_has_enough_takes_no_more() -> None:
    workers = {"a": Replica(Span(0, 4), in_flight=3, at_once=3), "b": Replica(Span(0, 4), unit_s=9.0)}
    assert wire(workers, ANYWHERE, Transfers()) == [("b", Span(0, 4))]
    workers["b"].in_flight = workers["b"].at_once = 3
    assert wire(workers, ANYWHERE, Transfers()) is None


def test_nobody_is_given_more_than_its_window() -> None:
    workers = {"a": Replica(Span(0, 4), in_flight=1, window=1)}
    assert wire(workers, ANYWHERE, Transfers()) is None
    workers["a"].window = 2
    assert wire(workers, ANYWHERE, Transfers()) is not None
    workers["a"].at_once = 1
    assert wire(workers, ANYWHERE, Transfers()) is None, "room for more does not make a pipeline longer"


def test_a_route_may_enter_and_leave_in_the_middle_of_a_span() -> None:
    workers = {"a": Replica(Span(0, 3)), "b": Replica(Span(2, 4), unit_s=0.001)}
    assert wire(workers, ANYWHERE, Transfers()) == [("a", Span(0, 2)), ("b", Span(2, 4))]
    workers = {"a": Replica(Span(0, 3), unit_s=0.001), "b": Replica(Span(2, 4))}
    assert wire(workers, ANYWHERE, Transfers()) == [("a", Span(0, 3)), ("b", Span(3, 4))]


def test_what_is_counted_goes_through_who_counted_it() -> None:
    workers = {"a": Replica(Span(0, 4), unit_s=0.001), "b": Replica(Span(1, 3), unit_s=9.0)}
    route = wire(workers, [None, "b", "b", None], Transfers())
    assert route == [("a", Span(0, 1)), ("b", Span(1, 3)), ("a", Span(3, 4))]


def test_who_has_counted_some_of_its_units_may_take_the_others() -> None:
    assert wire({"a": Replica(Span(0, 4))}, [None, "a", None, "a"], Transfers()) == [("a", Span(0, 4))]


def links(peers: str, sending_s: dict[str, float], delay_s: float = 0.0) -> Transfers:
    """All paths of a peer pair ("ab") in seconds; 1 where nothing is said."""
    sending_NN = np.array([[sending_s.get("".join(sorted(a + b)), 1.0) for b in peers] for a in peers])
    transfers = Transfers()
    transfers.know(list(peers), np.full((len(peers), len(peers)), delay_s), sending_NN)
    return transfers


HALVES = {peer: Replica(Span(0, 2) if peer in "ab" else Span(2, 4), unit_s=0.1) for peer in "abcd"}


def test_a_microbatch_is_handed_on_where_the_link_is_fast() -> None:
    near = links("abcd", {"ad": 0.1, "bc": 0.1})
    ways = [wire(HALVES, [first, first, None, None], near) for first in "ab"]
    assert [way[1][0] for way in ways if way] == ["d", "c"]


def test_a_slow_link_is_crossed_where_the_fast_one_is_full() -> None:
    """Two to a's near partner take 2 x (2 x 0.3 s) and the way of the second; another one by the slow link takes 2 x 0.8 s."""
    workers = {peer: replace(worker) for peer, worker in HALVES.items()}
    paths = links("abcd", {"ac": 0.3, "ad": 0.8})
    seconds = []
    for _ in range(4):
        route = wire(workers, ["a", "a", None, None], paths)
        assert route is not None
        book(route, workers, paths, 1)
        seconds.append(route[1][0])
    assert seconds[:2] == ["c", "c"] and "d" in seconds


def test_what_is_booked_is_freed_when_it_is_back() -> None:
    workers = {peer: replace(worker) for peer, worker in HALVES.items()}
    paths = links("abcd", {})
    before_NN = paths.there_and_back_s("abcd")
    route = wire(workers, ANYWHERE, paths)
    assert route is not None
    book(route, workers, paths, 1)
    assert (paths.there_and_back_s("abcd") > before_NN).any()
    paths.know(list("dcba"), np.zeros((4, 4)), np.ones((4, 4)))  # news of the links do not touch what is booked
    book(route, workers, paths, -1)
    assert (paths.there_and_back_s("abcd") == before_NN).all() and workers == HALVES


def test_a_line_carries_one_message_after_another_whoever_they_are_for() -> None:
    paths = links("abc", {"ab": 0.5, "ac": 0.5, "bc": 0.5}, delay_s=0.1)
    assert paths.there_and_back_s("ac")[0, 1] == pytest.approx(0.6 + 0.6)
    paths.book(["a", "b"], 1)
    assert paths.there_and_back_s("ac")[0, 1] == pytest.approx(1.1 + 0.6), "a still sends to b; c sends to nobody"


def test_what_a_home_sends_leaves_by_its_line_and_what_stays_does_not() -> None:
    """a and b are at home with each other, c and d somewhere else each."""
    out_NN = 1.0 - np.eye(4)
    out_NN[0, 1] = out_NN[1, 0] = 0.1
    alone, shared = Transfers(), Transfers()
    alone.know(list("abcd"), np.zeros((4, 4)), out_NN)
    shared.know(list("abcd"), np.zeros((4, 4)), out_NN, homes=[0, 0, 1, 2])
    for transfers in (alone, shared):
        transfers.book(["a", "c"], 1)
        transfers.book(["b", "d"], 1)
        transfers.book(["a", "b"], 1)
    assert [max(map(one.busy_s, "abcd")) for one in (alone, shared)] == [1.0, 2.0]
    assert shared.there_and_back_s(["a", "c"])[0, 1] == pytest.approx(3.0 + 2.0)
    assert shared.there_and_back_s(["a", "b"])[0, 1] == alone.there_and_back_s(["a", "b"])[0, 1]
    assert shared.idle().busy_s("a") == 0.0


def test_no_name_is_favoured() -> None:
    """Of equal replicas it is not always the one that comes first in the alphabet."""
    firsts = set()
    for swarm in range(20):
        workers = {f"{swarm} {name}": Replica(Span(0, 4)) for name in "abc"}
        route = wire(workers, ANYWHERE, Transfers())
        assert route is not None
        firsts.add(route[0][0][-1])
    assert firsts == set("abc")


def busy_schedule(speeds: dict[str, float], microbatches: int, at_once: int) -> tuple[Counter[str], float]:
    """How many microbatches each replica of a whole model did, when they are given out as they come back, and when all were."""
    workers = {peer: Replica(Span(0, UNITS), unit_s=unit_s, at_once=at_once) for peer, unit_s in speeds.items()}
    back: list[tuple[float, str]] = []
    free_at_s = dict.fromkeys(speeds, 0.0)
    done: Counter[str] = Counter()
    now_s, left = 0.0, microbatches
    while left or back:
        route = wire(workers, ANYWHERE, Transfers(), left=left) if left else None
        if route is None:
            now_s, peer = heapq.heappop(back)
            workers[peer].booked_units -= UNITS
            workers[peer].in_flight -= 1
            done[peer] += 1
            continue
        ((peer, _),) = route
        left -= 1
        workers[peer].booked_units += UNITS
        workers[peer].in_flight += 1
        free_at_s[peer] = max(now_s, free_at_s[peer]) + UNITS * speeds[peer]
        heapq.heappush(back, (free_at_s[peer], peer))
    return done, now_s


@settings(max_examples=8, deadline=None)
@given(unit_s=st.floats(0.001, 1.0), at_once=st.integers(2, 4))
def test_half_the_speed_gets_half_the_work(unit_s: float, at_once: int) -> None:
    done, _ = busy_schedule({"fast": unit_s, "slow": 2 * unit_s}, 100, at_once)
    assert done["slow"] == pytest.approx(done["fast"] / 2, rel=0.15)


def test_who_is_slow_is_not_waited_for() -> None:
    """Three take 4 s for a microbatch, one 40 s: of a hundred it does some, of nine none, and at the end all wait for nobody."""
    speeds = {"a": 1.0, "b": 1.0, "c": 1.0, "slow": 10.0}
    done, took_s = busy_schedule(speeds, 100, at_once=4)
    assert done["slow"] >= 2 and took_s < 1.05 * 100 / (3 / 4 + 1 / 40)
    done, took_s = busy_schedule(speeds, 9, at_once=4)
    assert not done["slow"] and took_s == pytest.approx(12.0)


def test_nobody_is_waited_for_because_it_says_that_it_is_fast() -> None:
    """It has all that it may have, and never answers."""
    workers = {
        "a": Replica(Span(0, 4), 1.0),
        "b": Replica(Span(0, 4), 1.5),
        "liar": Replica(Span(0, 4), 1e-9, 12, 3, 3),
    }
    for _ in range(6):
        route = wire(workers, ANYWHERE, Transfers(), left=1)
        assert route is not None and route[0][0] != "liar"
        book(route, workers, Transfers(), 1)


def test_what_a_slow_one_has_counted_or_holds_alone_goes_through_it() -> None:
    workers = {peer: Replica(Span(0, 4), 1.0) for peer in "abc"} | {"slow": Replica(Span(0, 4), 100.0)}
    counted = ["slow", None, None, None]
    route = wire(workers, counted, Transfers(), left=1)
    assert route is not None and route[0][0] == "slow"
    alone = {peer: Replica(Span(0, 2), 1.0) for peer in "abc"} | {"slow": Replica(Span(2, 4), 100.0, 8, 2)}
    route = wire(alone, ANYWHERE, Transfers(), left=1)
    assert route is not None and route[-1] == ("slow", Span(2, 4))


spans = st.tuples(st.integers(0, UNITS - 1), st.integers(1, UNITS)).map(
    lambda pair: Span(pair[0], min(UNITS, pair[0] + pair[1]))
)
crews = st.dictionaries(
    st.sampled_from("abcde"),
    st.builds(
        Replica, spans, st.floats(0.0, 1.0), st.integers(0, 8), st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)
    ),
)


def assert_fits(route: list[Wire], workers: dict[str, Replica], fixed: list[str | None]) -> None:
    assert [unit for _, span in route for unit in range(*span)] == list(range(UNITS))
    assert all(left[0] != right[0] for left, right in pairwise(route))
    for peer, span in route:
        worker = workers[peer]
        assert worker.span.start <= span.start < span.end <= worker.span.end
        assert worker.is_free
        assert all(fixed[unit] in (None, peer) for unit in range(*span))


@settings(max_examples=150, deadline=None)
@given(workers=crews, fixed=st.lists(st.sampled_from([None, None, "a", "b"]), min_size=UNITS, max_size=UNITS))
def test_every_route_fits(workers: dict[str, Replica], fixed: list[str | None]) -> None:
    route = wire(workers, fixed, Transfers())
    if route is not None:
        assert_fits(route, workers, fixed)


@settings(max_examples=100, deadline=None)
@given(workers=crews)
def test_there_is_a_route_where_free_workers_hold_all_units(workers: dict[str, Replica]) -> None:
    free = [worker for worker in workers.values() if worker.is_free]
    covered = {unit for worker in free for unit in range(*worker.span)}
    assert (wire(workers, ANYWHERE, Transfers()) is not None) == (covered == set(range(UNITS)))


@pytest.mark.parametrize("left", [1, 2, 3])
def test_what_is_left_has_a_way_where_all_who_hold_a_unit_are_slow(left: int) -> None:
    """Each of three would be done later than the two others: all counted as late, and the step never ended."""
    fast = {f"fast {number}": Replica(Span(0, 3), unit_s=0.1) for number in range(6)}
    slow = {f"slow {number}": Replica(Span(3, 4), unit_s=1.0) for number in range(3)}
    route = wire(fast | slow, ANYWHERE, Transfers(), left=left)
    assert route is not None and route[-1][0] in slow


def test_peers_that_are_kept_apart_meet_on_no_route_unless_there_is_no_other_one() -> None:
    first = {name: Replica(Span(0, 2)) for name in "ab"}
    behind = {name: Replica(Span(2, 4)) for name in "cd"}
    workers, transfers = {**first, **behind}, Transfers()
    none_NN = np.zeros((4, 4))
    assert transfers.separate("a", "c") and not transfers.separate("c", "a"), "before the links are known"
    transfers.know("abcd", none_NN, none_NN)
    assert transfers.separate("a", "d")
    for _ in range(2):
        transfers.know("bcd", none_NN[:3, :3], none_NN[:3, :3])
        transfers.know("abcd", none_NN, none_NN)  # it stays when a peer comes back
        for _ in range(8):
            route = wire(workers, ANYWHERE, transfers)
            assert route is not None and route[0][0] == "b"
            book(route, workers, transfers, 1)
    assert {peer for peer, _ in wire({"a": first["a"], "c": behind["c"]}, ANYWHERE, transfers) or ()} == {"a", "c"}
