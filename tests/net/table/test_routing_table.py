from __future__ import annotations

from swarmnode.net.kademlia import BUCKET_PEERS, DOUBTFUL_S, RoutingTable, diverse, node_id


def far_from(own: str, count: int, name: str) -> list[str]:
    """Peers of the bucket that half of all belong to."""
    every = (f"{name} {number}" for number in range(1000))
    return [peer for peer in every if (node_id(peer) ^ node_id(own)).bit_length() == 160][:count]


def test_who_is_known_stays_and_is_asked_when_others_come():
    now_s = 0.0
    table = RoutingTable("me", lambda: now_s)
    known, late = far_from("me", BUCKET_PEERS, "known"), far_from("me", 1, "late")[0]
    assert [table.record_contact(peer, peer) for peer in known] == [None] * BUCKET_PEERS
    assert table.record_contact(known[0], known[0]) is None, "heard again: the latest now"
    assert table.record_contact(late, late) is None and late not in table, "all were heard just now"
    now_s = DOUBTFUL_S
    assert table.record_contact(known[2], known[2]) is None
    assert table.record_contact(late, late) == known[1] and late not in table
    table.lost(known[1])
    assert table.record_contact(late, late) is None and late in table
    assert len(table) == BUCKET_PEERS and table.record_contact("me", "me") is None and "me" not in table


def test_a_crowd_of_one_address_group_gives_way():
    table = RoutingTable("me")
    for peer in far_from("me", BUCKET_PEERS, "crowd"):
        table.record_contact(peer, "203.0.113.0/24")
    others = far_from("me", BUCKET_PEERS, "other")
    for number, peer in enumerate(others):
        table.record_contact(peer, f"198.51.{number}.0/24")
    assert len(set(others) & table.peers()) == BUCKET_PEERS - 2


def test_diverse_takes_few_of_a_group_while_there_are_others():
    groups = {
        "a": "1.2.3.0/24",
        "b": "1.2.3.0/24",
        "c": "1.2.3.0/24",
        "d": "192.168.0.1",
        "e": "192.168.0.1",
        "f": "192.168.0.1",
    }
    assert diverse("abcdef", groups, 4) == ["a", "b", "d", "e"]
    assert diverse("abcdef", groups, 6) == ["a", "b", "d", "e", "f", "c"]
