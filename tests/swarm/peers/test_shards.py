"""Keys of the DHT: none is crowded, and readers look where writers write."""

from __future__ import annotations

import pytest

from swarmnode.swarm.peers import shards
from swarmnode.swarm.peers.shards import ALL, SAMPLE, WIDE, Shard
from tests.swarm.population import Population

SWARM = bytes(32)


def test_small_swarm_is_one_key():
    assert shards.all_shards(ALL, 0) == shards.all_shards(ALL, 40) == [SAMPLE] == [shards.own_shard(ALL, "peer", 1)]
    assert SAMPLE.key(SWARM) == SWARM + b":peers:0:0"
    assert Shard(WIDE, 3, 5).key(SWARM) == SWARM + b":units:wide:3:5"
    assert Shard("12", 0, 0).key(SWARM) == SWARM + b":units:12:0:0"


@pytest.mark.parametrize("peers", [1, 43, 64, 65, 100, 129, 500, 3000, 20000])
def test_readers_find_writers_who_counted_a_little_differently(peers):
    for counted in (peers * 0.7, peers, peers * 1.45):
        looked = set(shards.all_shards("3", counted))
        assert all(shards.own_shard("3", f"peer {i}", peers) in looked for i in range(200))


@pytest.mark.parametrize("peers", [60, 120, 1000, 10_000])
def test_no_key_is_crowded(peers):
    population = Population.draw(peers, units=40)
    assert max(map(len, population.at.values())) <= 110


@pytest.mark.parametrize(
    ("span", "places"),
    [
        ((0, 8), ["0"]),
        ((7, 9), ["0", "1"]),
        ((8, 33), ["1", "2", "3", "4"]),
        ((8, 41), [WIDE]),
        ((0, 0), [WIDE]),
        ((4095, 4096), ["511"]),
    ],
)
def test_places_of_spans(span, places):
    assert shards.places_of(span) == places


def test_whoever_looks_for_a_unit_reads_two_places():
    assert shards.places(40) == [WIDE, "0", "1", "2", "3", "4"]
    for span in [(0, 3), (5, 30), (1, 40), (38, 40)]:
        for unit in range(*span):
            assert {WIDE, *shards.places_of((unit, unit + 1))} & set(shards.places_of(span))


@pytest.mark.parametrize("peers", [10, 64, 200, 1000, 10_000])
@pytest.mark.parametrize("seed", range(4))
def test_the_door_tells_how_large_the_swarm_is(peers, seed):
    in_sample = Population.draw(peers, 40, seed=seed).at[SAMPLE]
    assert len(in_sample) <= min(peers, 90)
    estimate = shards.peers_from_sample(in_sample)
    assert estimate == peers if peers <= 32 else 0.6 * peers < estimate < 1.6 * peers


def test_those_who_wrote_to_the_door_by_a_smaller_estimate_do_not_mislead():
    population = Population.draw(5000, 40)
    generous = [peer for peer in population.spans if shards.is_in_sample(peer, 2500)]
    assert 0.6 * 5000 < shards.peers_from_sample(generous) < 1.6 * 5000
