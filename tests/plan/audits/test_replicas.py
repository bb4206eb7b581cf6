"""Who computes a session once more."""

from __future__ import annotations

import random

from swarmnode.codec.body import HopSpec
from swarmnode.plan.audits import SAME_CLASS, audit_route, second_route
from swarmnode.swarm.records.announcement import Announcement, State

ROUTE = (HopSpec("a", 0, 3), HopSpec("b", 3, 6))


def peer(
    name: str,
    start: int,
    end: int,
    number_format: str = "bfloat16",
    state: State = State.READY,
    bits: bytes = b"",
) -> Announcement:
    span = start, end
    return Announcement(1, bytes(32), name, 1, 0.0, 9.0, 0.0, state, span, number_format=number_format, bits=bits)


def second(*others: Announcement, avoid: tuple[str, ...] = ()) -> tuple[str, ...] | None:
    peers = {one.peer: one for one in (peer("a", 0, 3), peer("b", 3, 6), *others)}
    found = second_route(ROUTE, peers, random.Random(1), avoid=avoid)
    if found is not None:
        assert [(hop.start, hop.end) for hop in found] == [(0, 3), (3, 6)]
    return None if found is None else tuple(hop.peer for hop in found)


def test_replicas_take_the_places_that_they_can() -> None:
    assert second(peer("c", 0, 3), peer("d", 2, 6)) == ("c", "d")
    assert second(peer("d", 2, 6)) == ("a", "d")
    assert second(peer("e", 0, 6)) == ("e", "b"), "a peer has one place"
    assert second() is None


def test_who_computes_otherwise_is_still_loading_or_avoided_takes_no_part() -> None:
    assert second(peer("c", 0, 3, "bfloat16-nf4"), peer("d", 3, 6, state=State.LOADING)) is None
    assert second(peer("c", 0, 3), avoid=("c",)) is None


def test_nobody_can_tell_who_it_will_be() -> None:
    peers = {one.peer: one for one in (peer("a", 0, 3), peer("b", 3, 6), *(peer(f"c{n}", 0, 3) for n in range(4)))}
    drawn = {second_route(ROUTE, peers, random.Random(seed))[0].peer for seed in range(64)}  # type: ignore[index]
    assert drawn == {"c0", "c1", "c2", "c3"}


def test_replicas_of_the_same_classes() -> None:
    """A hop without a class has no replica of the same one; classes may differ from hop to hop."""
    one, two = b"one", b"two"
    route = [peer("a", 0, 3, bits=one), peer("b", 3, 6, bits=two)]
    others = [peer("c", 0, 3, bits=one), peer("d", 3, 6, bits=one), peer("e", 0, 3), peer("f", 0, 3, bits=two)]

    def drawn(*peers: Announcement) -> set[str]:
        known = {one.peer: one for one in peers}
        found = (second_route(ROUTE, known, random.Random(seed), same_bits=True) for seed in range(32))
        return {"-" if route is None else "".join(hop.peer for hop in route) for route in found}

    assert drawn(*route, *others) == {"cb"}
    assert drawn(*route, *others, peer("g", 3, 6, bits=two)) == {"cg"}
    assert drawn(*route, *others[1:]) == {"-"}
    assert drawn(route[0], peer("b", 3, 6), *others) == {"-"}
    assert drawn(route[0], *others) == {"-"}, "of a peer that has gone no class is known"


def drawn_routes(*peers: Announcement, moved: bool = False) -> list[tuple[str, bool]]:
    known = {one.peer: one for one in peers}
    found = (audit_route(ROUTE, known, random.Random(seed), moved=moved) for seed in range(1000))
    return [("-" if route is None else "".join(hop.peer for hop in route), exact) for route, exact in found]


def test_helpers_with_a_class_of_their_own_audit_a_liar_in_some_texts_only() -> None:
    """A fourth of the audits goes to any replica: most of these to honest ones, if most are."""
    one, two = b"one", b"two"
    liars = [peer("a", 0, 3, bits=two), *(peer(f"l{number}", 0, 3, bits=two) for number in range(2))]
    honest = [peer(f"h{number}", 0, 3, bits=one) for number in range(6)]
    last = [peer("b", 3, 6, bits=one)]
    found = drawn_routes(*liars, *honest, *last)
    by_class = [route for route, exact in found if exact]
    assert 0.7 < len(by_class) / len(found) < 0.8 and abs(SAME_CLASS - 0.75) < 1e-9
    assert {route[0] for route in by_class} == {"l"}
    by_honest = sum(route.startswith("h") for route, exact in found if not exact)
    assert 0.15 < by_honest / len(found) < 0.25


def test_digests_decide_only_if_a_third_peer_of_the_class_can() -> None:
    bits = b"one"
    pair = [peer("a", 0, 3, bits=bits), peer("b", 3, 6, bits=bits), peer("c", 0, 3, bits=bits)]
    assert not any(exact for _, exact in drawn_routes(*pair))
    assert not any(exact for _, exact in drawn_routes(*pair, peer("d", 0, 3)))
    three = [*pair, peer("e", 0, 3, bits=bits)]
    assert {exact for _, exact in drawn_routes(*three)} == {False, True}
    assert not any(exact for _, exact in drawn_routes(*three, moved=True))
    assert not any(exact for _, exact in drawn_routes(*three, peer("f", 3, 6, bits=bits)))
    assert not any(exact for _, exact in drawn_routes(*three, peer("f", 3, 6))), (
        "a hop that only others can audit is audited"
    )
    assert not any(exact for _, exact in drawn_routes(peer("a", 0, 3, bits=bits), *three[2:], peer("b", 3, 6)))
