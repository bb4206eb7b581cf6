"""Announcements in the table: which are kept, and under which keys."""

from __future__ import annotations

import pytest

from swarmnode.net.interfaces import key_digest
from swarmnode.swarm.peers.record_validation import record_validator
from swarmnode.swarm.peers.shards import ALL, SAMPLE, WIDE, Shard, own_shard
from tests.swarm.records.test_announcement import NOW, SWARM, fake_verify, make, record

PEER = b"peer-a"
valid = record_validator(SWARM, fake_verify, lambda: NOW)


def digest(shard: Shard, swarm: bytes = SWARM) -> bytes:
    return key_digest(shard.key(swarm))


def test_what_holds_is_kept_for_as_long_as_its_author_wants():
    key, good = digest(SAMPLE), record(make())
    assert valid(key, PEER, good, NOW + 16)
    assert not valid(key, b"peer-b", good, NOW + 16), "another peer's subkey"
    assert not valid(key, PEER, good, NOW + 17), "kept longer than its author wanted"
    assert not valid(key, PEER, good[:-1] + bytes([good[-1] ^ 1]), NOW + 16), "damaged signature"
    assert not valid(key, PEER, bytes(2000), NOW + 16), "too large"
    ahead = make(issued_at=NOW + 1000, expires_at=NOW + 1016)
    assert not valid(key, PEER, record(ahead), NOW + 1016), "from a far future"


@pytest.mark.parametrize("peers", [1, 100, 300, 10_000, 60_000])
@pytest.mark.parametrize(("span", "places"), [((4, 20), ["0", "1", "2"]), ((0, 0), [WIDE]), ((0, 200), [WIDE])])
def test_it_belongs_under_its_own_keys_of_every_level(peers, span, places):
    good = record(make(span=span))
    for place in (ALL, *places):
        assert valid(digest(own_shard(place, "peer-a", peers)), PEER, good, NOW + 16)


def test_one_record_does_not_fill_a_table():
    """It was taken under any key that anybody invented: one filled the 512 keys that a table had."""
    good = record(make(span=(0, 8)))
    invented = [b"invented %d" % number for number in range(511)]
    assert not any(valid(key_digest(key), PEER, good, NOW + 16) for key in invented)
    places = [ALL, WIDE, *map(str, range(64))]
    shards = [Shard(place, level, number) for place in places for level in range(7) for number in range(1 << level)]
    assert sum(valid(digest(shard), PEER, good, NOW + 16) for shard in shards) == 3 * 7  # all, wide, and range 0
    assert not valid(digest(SAMPLE, bytes(32)), PEER, good, NOW + 16), "another swarm's key"


def test_a_peer_that_moved_says_so_once_more_where_it_was():
    old = digest(own_shard("5", "peer-a", 1))
    assert not valid(old, PEER, record(make(span=(0, 8))), NOW + 16)
    assert valid(old, PEER, record(make(span=(0, 8), left=(40, 48))), NOW + 16)
