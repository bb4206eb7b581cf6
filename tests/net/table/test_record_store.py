from __future__ import annotations

from swarmnode.net.addressing.addresses import Claimant
from swarmnode.net.interfaces import MAX_RECORD_BYTES
from swarmnode.net.kademlia import MAX_RECORDS, MAX_SUBKEYS, RecordStore

NOW = 1_000.0
STRANGER = "203.0.113.0/24"


class Shop:
    """A store and its clock."""

    def __init__(self) -> None:
        self.now = NOW
        self.store = RecordStore(lambda: self.now)

    def put(self, key: int, subkey: str, *, group: str = "home", writer: str = "", life_s: float = 60) -> bool:
        return self.store.store(key, subkey.encode(), b"value", self.now + life_s, Claimant(group, writer or subkey))


def test_the_record_that_expires_last_stays():
    shop = Shop()
    assert shop.put(1, "a", life_s=20) and shop.put(1, "a", life_s=30)
    assert not shop.put(1, "a", life_s=25) and not shop.put(1, "b", life_s=0)
    assert {subkey: record.expires_at for subkey, record in shop.store.get(1).items()} == {b"a": NOW + 30}
    shop.now += 31
    assert shop.store.get(1) == {} and len(shop.store) == 0


def test_what_is_too_large_is_refused():
    store = Shop().store
    assert not store.store(1, b"a", bytes(MAX_RECORD_BYTES + 1), NOW + 9, Claimant("", "a"))
    assert not store.store(1, bytes(1000), b"", NOW + 9, Claimant("", "a"))


def test_a_stranger_with_many_identities_takes_no_more_than_what_is_free():
    """Whoever filled a key first kept it: newcomers were refused."""
    shop = Shop()
    members = [f"member {number}" for number in range(40)]
    for number, member in enumerate(members[:20]):
        assert shop.put(1, member, group=f"home {number}")
    for number in range(5 * MAX_SUBKEYS):
        shop.put(1, f"invented {number}", group=STRANGER)
    assert len(shop.store.get(1)) == MAX_SUBKEYS
    for number, member in enumerate(members[20:]):
        assert shop.put(1, member, group=f"other {number}"), "late members find room"
    kept = set(shop.store.get(1))
    assert {member.encode() for member in members} <= kept and len(kept) == MAX_SUBKEYS


def test_in_one_house_the_peer_with_most_gives_way():
    shop = Shop()
    for number in range(2 * MAX_SUBKEYS):
        shop.put(1, f"of one {number}", writer="one")
    assert shop.put(1, "of another", writer="another")
    assert not shop.put(1, "of one again", writer="one")
    assert b"of another" in shop.store.get(1)


def test_invented_keys_do_not_fill_the_store():
    shop = Shop()
    assert shop.put(0, "member")
    for key in range(1, 2 * MAX_RECORDS):
        shop.put(key, "invented", group=STRANGER, life_s=600)
    assert sum(1 for _ in shop.store.items()) == MAX_RECORDS
    assert shop.put(5 * MAX_RECORDS, "late member") and shop.put(0, "another member")
    assert set(shop.store.get(0)) == {b"member", b"another member"}


def test_what_has_expired_makes_room():
    shop = Shop()
    for key in range(MAX_RECORDS):
        shop.put(key, "a", life_s=5)
    assert not shop.put(MAX_RECORDS, "a", life_s=5)
    shop.now += 6
    assert shop.put(MAX_RECORDS, "a", life_s=5) and len(shop.store) == 1


def test_who_brings_others_records_does_not_pay_for_them_once_they_come_themselves():
    """A keeper hands over what it has; its authors renew it."""
    shop = Shop()
    for number in range(MAX_SUBKEYS):
        assert shop.put(1, f"peer {number}", group="keeper", writer="keeper", life_s=10)
    for number in range(MAX_SUBKEYS):
        assert shop.put(1, f"peer {number}", group=f"home {number}", life_s=20)
    assert not shop.put(1, "stranger 1", group="home 1", writer="peer 1"), "all have one"
    assert len(shop.store.get(1)) == MAX_SUBKEYS


def test_long_records_do_not_hide_short_ones_from_readers():
    """A key with more than the room of an answer was read as empty."""
    store = Shop().store
    for number in range(MAX_SUBKEYS // 2):
        assert store.store(1, b"long %d" % number, bytes(MAX_RECORD_BYTES), NOW + 9, Claimant(STRANGER, f"{number}"))
        assert store.store(1, b"short %d" % number, bytes(1000), NOW + 9, Claimant(f"home {number}", f"{number}"))
    found = store.some(1, room_bytes=256 << 10)
    assert sum(subkey.startswith(b"short") for subkey in found) == MAX_SUBKEYS // 2
    assert 0 < sum(subkey.startswith(b"long") for subkey in found) < MAX_SUBKEYS // 2
    assert store.some(2, room_bytes=256 << 10) == {} and store.some(1, room_bytes=0) == {}
