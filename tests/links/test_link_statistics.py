"""Link statistics: medians of round trips, and capacities that a few liars do not move."""

from __future__ import annotations

import pytest

from swarmnode.links.link_statistics import FRESH_S, PEERS_KEPT, LinkStatistics
from tests.watch import Watch


@pytest.fixture
def watch():
    return Watch()


def test_a_round_trip_that_stood_in_a_queue_does_not_count():
    heard = []
    link_statistics = LinkStatistics(on_rtt=lambda peer, rtt_s: heard.append((peer, rtt_s)))
    for rtt_s in (0.05, 0.06, 2.0, 0.055):
        link_statistics.round_trip("a", rtt_s)
    assert link_statistics.rtts_s() == {"a": 0.055}
    assert [rtt_s for _, rtt_s in heard] == [0.05, 0.05, 0.06, 0.055]


def test_a_peer_that_was_never_reached_is_expected_to_be_where_it_says_or_as_far_as_others():
    guesses = {"far": 0.4}
    link_statistics = LinkStatistics(guess=guesses.get)
    assert link_statistics.expected_rtt_s("near") is None
    for peer, rtt_s in (("a", 0.01), ("b", 0.02), ("c", 0.3)):
        link_statistics.round_trip(peer, rtt_s)
    expected = {peer: link_statistics.expected_rtt_s(peer) for peer in ("a", "far", "unknown")}
    assert expected == {"a": 0.01, "far": 0.4, "unknown": 0.02}


def test_who_was_heard_of_last_comes_first():
    link_statistics = LinkStatistics()
    for peer in "abcab":
        link_statistics.round_trip(peer, 0.1)
    assert list(link_statistics.rtts_s(most=2)) == ["b", "a"]


def test_capacity_is_what_fast_paths_show_but_not_what_one_peer_claims(watch):
    link_statistics = LinkStatistics(clock=watch)
    assert link_statistics.up_bps == link_statistics.down_bps == 0
    link_statistics.sent("near", 50e6)
    assert link_statistics.up_bps == 50e6
    for peer, rate_bps in {"far": 8e6, "b": 48e6, "c": 49e6, "liar": 1e17}.items():
        link_statistics.sent(peer, rate_bps)
    assert link_statistics.up_bps == 50e6
    link_statistics.received("near", 200e6)
    assert link_statistics.down_bps == 200e6


def test_old_bandwidths_are_forgotten(watch):
    link_statistics = LinkStatistics(clock=watch)
    link_statistics.sent("a", 9e6)
    watch.now_s = FRESH_S + 1
    assert link_statistics.up_bps == 0


def test_memory_is_bounded():
    link_statistics = LinkStatistics()
    for number in range(3 * PEERS_KEPT):
        link_statistics.round_trip(str(number), 0.1)
    assert len(link_statistics.rtts_s()) == PEERS_KEPT
