import asyncio

import pytest

from swarmnode.metrics import table
from swarmnode.swarm.announcement import State, sign_announcement
from swarmnode.swarm.directory import Directory
from swarmnode.swarm.known_peers import KnownPeers
from tests.swarm.clock import FakeClock, settle
from tests.swarm.memory_dht import MemoryDht, MemoryNetwork
from tests.swarm.test_announcement import SWARM, fake_sign, fake_verify, make


class World:
    """Directories on one dictionary and one clock."""

    def __init__(self):
        self.clock = FakeClock()
        self.dht = MemoryDht(self.clock)
        self.directories = []

    async def join(self, peer, *, skew_s=0.0, known_peers=None, **announcement):
        directory = Directory(
            MemoryNetwork(self.dht, peer),
            SWARM,
            verify=fake_verify,
            sign=fake_sign(peer),
            known_peers=known_peers,
            now=lambda: self.clock.time() + skew_s,
            sleep=self.clock.sleep,
        )
        self.directories.append(directory)
        if announcement:
            directory.announce(**announcement)
        await directory.start()
        await settle()
        return directory

    async def kill(self, directory):
        """End it without a goodbye."""
        for task in directory._tasks:
            task.cancel()
        await asyncio.gather(*directory._tasks, return_exceptions=True)
        self.directories.remove(directory)


@pytest.fixture
async def world():
    world = World()
    yield world
    for directory in world.directories:
        await directory.close()


async def test_newcomer_is_seen_within_two_seconds(world):
    watcher = await world.join("watcher")
    assert watcher.peers() == {}
    revision = watcher.revision
    await world.join("a", state=State.READY, span=(0, 3))
    waiting = asyncio.create_task(watcher.changed(revision))
    await world.clock.advance(1.1)
    assert await waiting > revision
    assert watcher.peers()["a"].span == (0, 3)


async def test_state_change_goes_out_at_once_other_changes_wait(world):
    watcher = await world.join("watcher")
    a = await world.join("a", state=State.LOADING, span=(0, 3))
    stores = world.dht.stores
    a.announce(sessions=3)
    await settle()
    assert world.dht.stores == stores
    a.announce(state=State.READY)
    await settle()
    assert world.dht.stores == stores + 1
    await watcher.refresh()
    assert watcher.peers()["a"].life is State.READY and watcher.peers()["a"].sessions == 3
    assert a.peers()["a"].life is State.READY, "we see ourselves too"


async def test_silent_peer_expires_living_one_stays(world):
    watcher = await world.join("watcher")
    dead = await world.join("dead", state=State.READY)
    await world.join("alive", state=State.READY)
    await world.clock.advance(1)
    assert list(watcher.peers()) == ["alive", "dead"]
    await world.kill(dead)
    await world.clock.advance(17)
    assert list(watcher.peers()) == ["alive"]
    await world.clock.advance(100)
    assert list(watcher.peers()) == ["alive"]


async def test_goodbye_leaves_no_ghost(world):
    watcher = await world.join("watcher")
    a = await world.join("a", state=State.READY)
    await world.clock.advance(1)
    await a.close()
    await a.close()
    await watcher.refresh()
    assert "a" not in watcher.peers()


async def test_suspected_peer_comes_back_by_its_own_word(world):
    watcher = await world.join("watcher")
    a = await world.join("a", state=State.READY)
    await world.clock.advance(1)
    watcher.suspect("a", "hung")
    assert "a" not in watcher.peers()
    await world.clock.advance(1)
    assert "a" not in watcher.peers(), "the old record is still in the table"
    await world.clock.advance(6)
    assert "a" in watcher.peers()
    assert list(a.peers()) == ["a"], "its own view never changed"


async def test_same_identity_restarted_is_used_at_once(world):
    watcher = await world.join("watcher")
    a = await world.join("a", state=State.READY)
    await world.clock.advance(1)
    await world.kill(a)
    watcher.suspect("a", "killed")
    await world.clock.advance(0.5)
    await world.join("a", state=State.READY, span=(1, 2))
    await watcher.refresh()
    assert watcher.peers()["a"].span == (1, 2)


async def test_restart_with_the_clock_set_back_still_counts(world):
    watcher = await world.join("watcher")
    ahead = await world.join("a", skew_s=5.0, state=State.READY, span=(0, 1))
    await world.clock.advance(1)
    await world.kill(ahead)
    await world.join("a", state=State.READY, span=(1, 2))
    await world.clock.advance(2)
    await watcher.refresh()
    assert watcher.peers()["a"].span == (1, 2)


async def test_network_down_keeps_the_view_then_recovers(world):
    watcher = await world.join("watcher")
    await world.join("a", state=State.READY)
    await world.clock.advance(1)
    world.dht.down = True
    await world.clock.advance(5)
    assert "a" in watcher.peers()
    await world.clock.advance(15)
    assert "a" not in watcher.peers()
    world.dht.down = False
    await world.clock.advance(2)
    assert "a" in watcher.peers()


async def test_forged_records_are_passed_over(world):
    watcher = await world.join("watcher")
    key = SWARM + b":peers:0:0"
    now = world.clock.time()
    forged = sign_announcement(make("victim", issued_at=now, expires_at=now + 16), fake_sign("mallory"))
    await world.dht.store(key, b"victim", forged, expires_at=now + 16)
    await world.dht.store(key, b"junk", b"\xff" * 50, expires_at=now + 16)
    await watcher.refresh()
    assert watcher.peers() == {}


async def test_field_out_of_bounds_is_raised_to_the_caller(world):
    a = await world.join("a")
    with pytest.raises(ValueError, match="name"):
        a.announce(name="x" * 100)


async def test_addresses_are_remembered(world, tmp_path):
    path = tmp_path / "known.json"
    await world.join("a", state=State.READY, addresses=("/ip4/10.0.0.1/tcp/1",))
    watcher = await world.join("watcher", known_peers=KnownPeers(path))
    await watcher.close()
    assert KnownPeers(path).addresses() == ["/ip4/10.0.0.1/tcp/1/p2p/a"]


async def test_large_swarm_is_found_whole_and_read_more_slowly(world):
    directory = await world.join("watcher")
    now = world.clock.time()
    from swarmnode.swarm import shards

    for i in range(300):
        peer = f"peer {i}"
        record = sign_announcement(make(peer, issued_at=now, expires_at=now + 60, started_at=now), fake_sign(peer))
        await world.dht.store(shards.own_key(SWARM, peer, 300), peer.encode(), record, expires_at=now + 60)
    newcomer = await world.join("newcomer")
    await world.clock.advance(1.1)
    assert len(newcomer.peers()) == 300
    assert directory.config.read_period_s(300) == 5.0
    assert directory.config.publish_period_s(300) < 20.0


async def test_a_directory_counts_what_it_asks_of_the_dht(world):
    alice = await world.join("alice", state=State.READY, span=(0, 2))
    reads, stores = len(world.dht.keys_read), world.dht.stores
    world.dht.down = True
    await alice.refresh()
    times = {
        reading.labels[0]: reading.value
        for reading in alice.dht_meter.readings()
        if reading.metric is table.DHT_SECONDS
    }
    failures = {
        reading.labels: reading.value for reading in alice.dht_meter.readings() if reading.metric is table.DHT_FAILURES
    }
    assert (times["get"].count, times["store"].count) == (reads, stores)
    assert failures["get",] == 1
