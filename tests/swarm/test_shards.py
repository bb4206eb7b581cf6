import pytest

from swarmnode.swarm import shards

SWARM = bytes(32)


def test_small_swarm_is_one_key():
    assert shards.keys_to_read(SWARM, 0) == shards.keys_to_read(SWARM, 40) == [SWARM + b":peers:0:0"]
    assert shards.own_key(SWARM, "peer", 1) == SWARM + b":peers:0:0"


@pytest.mark.parametrize("peers", [1, 43, 64, 65, 100, 129, 500, 3000, 8000])
def test_readers_find_publishers_who_counted_a_little_differently(peers):
    for counted in (int(peers * 0.7), peers, int(peers * 1.45)):
        keys = set(shards.keys_to_read(SWARM, counted))
        assert all(shards.own_key(SWARM, f"peer {i}", peers) in keys for i in range(200))


@pytest.mark.parametrize("peers", [60, 120, 1000, 8000])
def test_no_key_is_crowded(peers):
    counts = {}
    for i in range(peers):
        key = shards.own_key(SWARM, f"peer {i}", peers)
        counts[key] = counts.get(key, 0) + 1
    assert max(counts.values()) <= 110


def test_probes_find_the_size():
    peers = 1000
    keys = [shards.own_key(SWARM, f"peer {i}", peers) for i in range(peers)]
    estimate = max(keys.count(key) * stands_for for key, stands_for in shards.probe_keys(SWARM).items())
    assert 0.7 * peers < estimate < 1.45 * peers
