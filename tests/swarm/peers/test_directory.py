import asyncio
from dataclasses import replace

import pytest

from swarmnode.metrics import table
from swarmnode.swarm.peers.directory import KEY_BYTES, Directory, DirectoryConfig
from swarmnode.swarm.records.announcement import MAX_LIFE_S, Introduction, Place, ServingLoad, State, sign_announcement
from swarmnode.swarm.storage.remembered import KnownPeers
from tests.swarm.clock import FakeClock, settle
from tests.swarm.memory_dht import MemoryDht, MemoryNetwork
from tests.swarm.population import Population
from tests.swarm.records.test_announcement import SWARM, fake_sign, fake_verify, make


class World:
    """Directories on one dictionary and one clock."""

    def __init__(self):
        self.clock = FakeClock()
        self.dht = MemoryDht(self.clock)
        self.directories = []

    async def join(self, peer, *, skew_s=0.0, known_peers=None, addresses=(), **place):
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
        if place:
            directory.announce(Place(**place), Introduction(addresses=addresses))
        await directory.start()
        await settle()
        return directory

    async def kill(self, directory):
        """End it without a goodbye."""
        await directory._tasks.close()
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
    a.announce(ServingLoad(sessions=3))
    await settle()
    assert world.dht.stores == stores
    a.announce(Place(state=State.READY))
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
    heard: list[tuple[str, str]] = []
    watcher._on_suspected = lambda peer, reason: heard.append((peer, reason))
    watcher.suspect("a", "hung")
    watcher.suspect("watcher", "itself")
    assert heard == [("a", "hung")], "which the record of findings takes"
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
        a.announce(Introduction(name="x" * 100))


async def test_addresses_are_remembered(world, tmp_path):
    path = tmp_path / "known.json"
    await world.join("a", state=State.READY, addresses=("/ip4/10.0.0.1/tcp/1",))
    watcher = await world.join("watcher", known_peers=KnownPeers(path))
    await watcher.close()
    assert KnownPeers(path).addresses() == ["/ip4/10.0.0.1/tcp/1/p2p/a"]


async def populate(world, peers, units=40, life_s=110):
    """A swarm that was there before, as it lies in the table."""
    population, now = Population.draw(peers, units), world.clock.time()
    for shard, there in list(population.at.items()):
        for peer in there:
            announcement = make(
                peer, issued_at=now, expires_at=now + life_s, started_at=now, span=population.spans[peer]
            )
            record = sign_announcement(announcement, fake_sign(peer))
            await world.dht.store(shard.key(SWARM), peer.encode(), record, expires_at=now + life_s)
    return population


async def test_a_swarm_of_more_than_one_key_is_found_whole_at_once(world):
    population = await populate(world, 200)
    newcomer = await world.join("newcomer")
    assert set(newcomer.peers()) == set(population.spans)
    assert newcomer.crowd == pytest.approx(200, rel=0.6)


async def test_of_a_large_swarm_a_sample_is_known_at_a_bounded_pace(world):
    await populate(world, 5000)
    reader = await world.join("reader", state=State.READY, span=(0, 8))
    read_before = sum(map(len, world.dht.keys_read))
    await world.clock.advance(100)
    assert reader.crowd == pytest.approx(5000, rel=0.6)
    assert 50 < len(reader.peers()) < 500
    assert sum(map(len, world.dht.keys_read)) - read_before < 12
    own_keys = [key for key, records in world.dht.records.items() if b"reader" in records]
    assert own_keys and all(key.startswith(SWARM + b":units:0:") for key in own_keys), "where its units are looked for"


async def test_in_a_large_swarm_too_all_holders_of_a_unit_can_be_found(world):
    population = await populate(world, 1000)
    reader = await world.join("reader", state=State.READY, span=(0, 8))
    await reader.read_holders(20)
    holders = {peer for peer, span in population.spans.items() if span[0] <= 20 < span[1]}
    assert holders <= set(reader.peers())


async def test_who_moves_says_so_where_it_was(world):
    await populate(world, 1000)
    mover = await world.join("mover", state=State.READY, span=(0, 8))
    watcher = await world.join("watcher", state=State.READY, span=(0, 8))
    await watcher.read_holders(3)
    assert watcher.peers()["mover"].span == (0, 8)
    mover.announce(Place(span=(32, 40)))
    await settle()
    await watcher.read_holders(3)
    assert watcher.peers()["mover"].span == (32, 40)


async def test_periods_grow_with_the_swarm_and_stay_below_the_longest_life():
    config = DirectoryConfig()
    assert [config.publish_period_s(peers) for peers in (1, 80, 160, 10_000)] == [5.0, 5.0, 10.0, 150.0]
    assert config.max_publish_s * config.life_factor <= MAX_LIFE_S
    read_bytes = KEY_BYTES + 64 * 600
    rests_s = [config.rest_s(1, [500] * 64, peers) for peers in (64, 1024, 10_000)]
    assert rests_s == [pytest.approx(read_bytes / rate) for rate in (12_000, 3_000, 600)]


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


async def test_what_is_read_in_calm_ends_with_fresh_news_of_everybody(world):
    watcher = await world.join("watcher", state=State.READY)
    for name in ("a", "b"):
        await world.join(name, state=State.READY)
    await world.clock.advance(1.1)
    assert world.dht.enough is None, "while somebody comes all keepers are asked"
    await world.clock.advance(60)
    ends = await reads(world, watcher, 4)
    assert [end is None for end in ends].count(True) == 1, "what one keeper holds back, another gives"
    enough = next(end for end in ends if end is not None)
    ((key, records),) = world.dht.records.items()
    assert enough(key, records)
    assert not enough(key, {subkey: record for subkey, record in records.items() if subkey != b"b"})
    stale = {subkey: replace(record, expires_at=record.expires_at - 9) for subkey, record in records.items()}
    assert not enough(key, stale)
    assert not enough(key, {})


async def test_who_is_overdue_is_looked_for_at_all_keepers(world):
    watcher = await world.join("watcher", state=State.READY)
    for name in ("a", "b"):
        dead = await world.join(name, state=State.READY)
    await world.clock.advance(60)
    await world.kill(dead)
    await world.clock.advance(14)
    assert dead.network.peer_id in watcher.peers()
    assert await reads(world, watcher, 4) == [None] * 4
    await world.clock.advance(3)
    assert dead.network.peer_id not in watcher.peers()


async def test_a_suspect_is_looked_for_at_all_keepers(world):
    watcher = await world.join("watcher", state=State.READY)
    await world.join("a", state=State.READY)
    await world.clock.advance(60)
    watcher.suspect("a", "hung")
    assert await reads(world, watcher, 4) == [None] * 4


async def reads(world, watcher, count):
    """What was to end each of the next reads."""
    ends = []
    for _ in range(count):
        await watcher.refresh()
        ends.append(world.dht.enough)
    return ends
