from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from swarmnode.net.addressing.addresses import Claimant
from swarmnode.net.kademlia import AT_ONCE, MAX_ASKED, KeyAnswer, Lookup, key_id, node_id
from tests.net.table.kademlia import LATER, NOW, Kademlia, TablePeer

KEY = key_id(b"a swarm's peers")


@pytest.mark.parametrize("peers", [5, 30, 200])
async def test_whatever_was_stored_is_found_from_everywhere(peers):
    table = Kademlia(peers + 1)
    writer, *readers = table.peers.values()
    keepers = await table.store(writer, KEY)
    others = sorted((peer for peer in table.peers if peer != writer.name), key=lambda peer: node_id(peer) ^ KEY)
    assert keepers == others[:5]
    for reader in readers[:20]:
        assert set((await table.look_up(reader, KEY)).records(KEY)) == {writer.name.encode()}


async def test_answers_are_merged():
    table = Kademlia(30)
    reader, *others = table.peers.values()
    nearest = sorted(others, key=lambda peer: node_id(peer.name) ^ KEY)[:3]
    for number, keeper in enumerate(nearest):
        for subkey in (b"only %d" % number, b"all"):
            keeper.store.store(KEY, subkey, b"of %d" % number, LATER + number, Claimant("", keeper.name))
    found = (await table.look_up(reader, KEY)).records(KEY)
    assert set(found) == {b"only 0", b"only 1", b"only 2", b"all"}
    assert found[b"all"].value == b"of 2", "the one that expires last"


async def test_nobody_else_is_asked_once_what_was_found_is_enough():
    table = Kademlia(30)
    reader = next(iter(table.peers.values()))
    (newcomer,) = reader.routing_table.nearest(KEY, 1)  # keeps one record only
    for keeper in table.peers.values():
        for subkey in (b"old", b"new") if keeper not in (reader, table.peers[newcomer]) else ():
            keeper.store.store(KEY, subkey, b"", LATER, Claimant("", "writer"))
    table.peers[newcomer].store.store(KEY, b"new", b"", LATER, Claimant("", "writer"))

    async def calls_until(*wanted: bytes) -> int:
        before = table.calls
        found = await table.look_up(reader, KEY, enough=lambda _key, records: set(wanted) <= set(records))
        assert set(wanted) <= set(found.records(KEY))
        return table.calls - before

    assert await calls_until(b"new") == 1
    assert await calls_until(b"new", b"old") == 2
    before = table.calls
    await table.look_up(reader, KEY, enough=lambda _key, _records: False)
    assert table.calls - before >= 8, "all that are near"
    reader.store.store(KEY, b"kept here", b"", LATER, Claimant("", "old"))
    assert await calls_until(b"kept here") == 0


async def test_the_silent_are_not_waited_for_one_by_one():
    table = Kademlia(30)
    reader = next(iter(table.peers.values()))
    for gone in reader.routing_table.nearest(KEY, 4):
        del table.peers[gone]
    at_once, most = 0, 0

    async def slow(peer: str, keys: Sequence[int]) -> list[KeyAnswer] | None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0)
        at_once -= 1
        return await table.ask(peer, keys)

    start = reader.routing_table.nearest
    await Lookup(reader.name, {KEY: {}}, start, slow, table.group_of, enough=lambda _key, _records: False).run()
    assert most == AT_ONCE


async def test_several_keys_share_calls():
    table = Kademlia(8)
    reader = next(iter(table.peers.values()))
    await table.look_up(reader, *(key_id(b"%d" % number) for number in range(8)))
    assert table.calls == 7, "each peer once"


async def test_the_dead_are_passed_by():
    table = Kademlia(60)
    writer, reader, *_ = table.peers.values()
    keepers = await table.store(writer, KEY)
    for keeper in keepers[:4]:
        del table.peers[keeper]
    assert (await table.look_up(reader, KEY)).records(KEY)


@pytest.mark.parametrize("liars", [5, 30, 100])
async def test_one_address_group_does_not_become_all_keepers_of_a_key(liars):
    """Five ids next to a key were all of its keepers, and all that readers asked."""
    table = Kademlia(60)
    writer, *readers = table.peers.values()
    readers = sorted(readers, key=lambda peer: node_id(peer.name) ^ KEY)[:: len(readers) // 3]  # its neighbours, too
    named = {liar.name for liar in table.invade(KEY, liars)}
    keepers = await table.store(writer, KEY)
    assert len(keepers) == 5 and len(named & set(keepers)) <= 2
    for reader in readers:
        assert set((await table.look_up(reader, KEY)).records(KEY)) == {writer.name.encode()}


async def test_on_a_network_of_ones_own_everybody_may_be_a_keeper():
    table = Kademlia(0)
    for number in range(12):
        table.add(TablePeer(f"lan {number}", "192.168.1.7"))
    for peer in table.peers.values():
        for other in table.peers:
            peer.routing_table.record_contact(other, "192.168.1.7")
    writer = next(iter(table.peers.values()))
    assert len(await table.store(writer, KEY)) == 5


async def test_a_look_up_ends_however_many_are_named():
    table = Kademlia(3)
    reader = next(iter(table.peers.values()))
    table.invade(KEY, 200)
    before = table.calls
    await table.look_up(reader, KEY)
    assert table.calls - before <= MAX_ASKED


async def test_expired_records_are_not_given():
    table = Kademlia(2)
    keeper, reader = table.peers.values()
    assert not keeper.store.store(KEY, b"old", b"", NOW, Claimant("", "a"))
    assert (await table.look_up(reader, KEY)).records(KEY) == {}
