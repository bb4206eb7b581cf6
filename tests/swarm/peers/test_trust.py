from __future__ import annotations

import pytest

from swarmnode.errors import UsageError
from swarmnode.swarm.records.announcement import EVERYBODY, Announcement, parse_trust
from tests.swarm.society import ALICE, BOB, NOW, SWARM


def said(peer: str, *addresses: str) -> Announcement:
    return Announcement(1, SWARM, peer, 1, NOW, NOW + 10, NOW, addresses=addresses)


def test_nobody_named_is_everybody_trusted():
    assert parse_trust([]) == EVERYBODY and EVERYBODY.covers(said(ALICE))


def test_peers_by_their_ids_or_ends():
    for word in (ALICE, ALICE[-8:]):
        trust = parse_trust([word])
        assert trust.covers(said(ALICE)) and not trust.covers(said(BOB))


def test_groups_are_what_the_owner_vouches_for():
    trust = parse_trust(["group:berlin"])
    assert trust.covers(said(ALICE), "berlin")
    assert not trust.covers(said(ALICE), "paris") and not trust.covers(said(ALICE), "")
    assert not parse_trust(["group:"]).covers(said(ALICE), ""), "no group is not the group of that name"


def test_networks_hold_all_addresses():
    trust = parse_trust(["net:203.0.113.0/24", "net:2001:db8::/32"])
    assert trust.covers(said(ALICE, "/ip4/203.0.113.7/tcp/4001"))
    assert trust.covers(said(ALICE, "/ip6/2001:db8::1/tcp/4001"))
    assert not trust.covers(said(ALICE, "/ip4/203.0.113.7/tcp/4001", "/ip4/198.51.100.1/tcp/4001"))
    assert not trust.covers(said(ALICE, "/dns4/example.org/tcp/4001"))
    assert not trust.covers(said(ALICE))


def test_any_one_reason_is_enough():
    trust = parse_trust([BOB, "group:berlin"])
    assert trust.covers(said(BOB)) and trust.covers(said(ALICE), "berlin") and not trust.covers(said(ALICE))


@pytest.mark.parametrize("word", ["", "abc", "net:203.0.113.7/24", "net:here", "two words here"])
def test_what_names_nobody_is_refused(word: str):
    with pytest.raises(UsageError):
        parse_trust([word])
