"""What spans and peers say of themselves."""

from __future__ import annotations

import pytest

from swarmnode.plan.view import PeerView, Span, view_of
from swarmnode.swarm.records.announcement import VERSION, Announcement, State, peer_digest


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (Span(0, 4), Span(3, 6), True),
        (Span(0, 4), Span(4, 6), False),
        (Span(0, 6), Span(2, 3), True),
        (Span(0, 6), Span(3, 3), False),
    ],
)
def test_spans_overlap_where_they_share_a_unit(one: Span, other: Span, expected: bool) -> None:
    assert one.overlaps(other) is other.overlaps(one) is expected
    assert bool(set(range(*one)) & set(range(*other))) is expected


def test_a_peer_that_nobody_measured_is_not_taken_to_stand_still() -> None:
    assert PeerView("measured", Span(0, 2), decode_units_per_s=7.5).assumed_units_per_s == 7.5
    assert PeerView("unmeasured", Span(0, 2)).assumed_units_per_s > 0


def test_prompts_are_taken_in_faster_than_tokens_are_made_where_nobody_measured() -> None:
    assert PeerView("measured", Span(0, 2), prefill_units_per_s=7.5).assumed_prefill_units_per_s == 7.5
    guess = PeerView("by its other speed", Span(0, 2), decode_units_per_s=7.5)
    assert guess.assumed_prefill_units_per_s > guess.assumed_units_per_s


def announced(peer: str, **fields: object) -> Announcement:
    return Announcement(VERSION, b"swarm", peer, 1, 0.0, 60.0, 0.0, State.READY, (0, 2), **fields)  # type: ignore[arg-type]


def test_what_is_announced_is_seen() -> None:
    ready = announced("a", decode_units_per_s=5.0, prefill_units_per_s=50.0, cache_tokens_free=100)
    (seen,) = view_of(2, [ready]).peers
    assert (seen.decode_units_per_s, seen.prefill_units_per_s) == (5.0, 50.0)
    assert seen.has_room(100) and not seen.has_room(101)


def test_who_trains_is_as_fast_as_it_trains() -> None:
    a = announced("a", decode_units_per_s=500.0, training_units_per_s=3.0, unit_us={peer_digest("b"): 1000})
    b = announced("b", decode_units_per_s=900.0, training_units_per_s=4.0)
    assert [peer.decode_units_per_s for peer in view_of(2, [a, b], trains=True).peers] == [3.0, 4.0]
    assert [peer.decode_units_per_s for peer in view_of(2, [a, b]).peers] == [500.0, 1000.0]
    assert all(peer.has_room(1 << 40) for peer in view_of(2, [a, b], trains=True).peers), (
        "sessions are not what it is for"
    )


def home(number: int) -> tuple[str, ...]:
    return (f"/ip4/8.8.{number}.1/tcp/4001",)


def test_claims_count_no_more_than_what_is_usual_once_that_is_known() -> None:
    measured = [announced(name, decode_units_per_s=9e9, addresses=home(n)) for n, name in enumerate("abc")]
    boaster = announced("z", decode_units_per_s=9e9, addresses=home(9))
    times_s = {"a": 0.01, "b": 0.02, "c": 0.04}
    view = view_of(2, [*measured, boaster], observer="me", unit_s=times_s)
    assert [peer.decode_units_per_s for peer in view.peers] == [100.0, 50.0, 25.0, 50.0]


def test_an_address_group_has_one_voice_and_none_for_its_own() -> None:
    sybils = [
        announced(f"s{n}", unit_us={peer_digest("s0"): 1, peer_digest("h0"): 90_000}, addresses=home(7))
        for n in range(5)
    ]
    others = [announced(f"h{n}", unit_us={peer_digest("h0"): 10_000}, addresses=home(n)) for n in range(3)]
    speeds = {peer.peer: peer.decode_units_per_s for peer in view_of(2, [*sybils, *others]).peers}
    assert speeds["s0"] == 0.0, "only its own have used it"
    assert speeds["h0"] == 100.0, "two of three voices"


def test_routes_are_chosen_by_what_one_session_gets_and_places_by_what_all_get() -> None:
    both = announced("both", decode_units_per_s=100.0, parallel_speedup=2.0)
    user = announced("user", unit_us={peer_digest("both"): 20_000}, addresses=home(1))
    (alone, _) = view_of(2, [both, user]).peers
    assert alone.assumed_units_per_s == 50.0, "as whoever used it found"
    assert view_of(2, [both, user]).with_many_sessions.peers[0].assumed_units_per_s == 100.0
    (trains,) = view_of(2, [announced("a", training_units_per_s=3.0, parallel_speedup=2.0)], trains=True).peers
    assert (trains.decode_units_per_s, trains.parallel_speedup) == (3.0, 1.0), "it counts all devices already"
