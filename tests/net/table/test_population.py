from __future__ import annotations

import pytest

from swarmnode.net.kademlia import BUCKET_PEERS, SAMPLES, Population, node_id


def look(population, peers, times=SAMPLES):
    for _ in range(times):
        place = population.next_place()
        population.saw(place, sorted(peers, key=lambda peer: node_id(peer) ^ place)[:BUCKET_PEERS])
    return population.peers


@pytest.mark.parametrize("count", [1, 6, 60, 1000, 10_000])
def test_peers_are_counted_by_how_densely_they_stand(count):
    assert look(Population(seed=3), [f"peer {number}" for number in range(count)]) == pytest.approx(count, rel=0.5)


def test_identities_that_were_tried_out_count_as_many_as_they_are():
    honest = [f"peer {number}" for number in range(300)]
    place = 12345
    nearest = min(node_id(peer) ^ place for peer in honest)
    tried = (f"tried {number}" for number in range(1_000_000))
    forged = [
        peer for peer, _ in zip((each for each in tried if node_id(each) ^ place < nearest), range(40), strict=False)
    ]
    assert len(forged) == 40
    assert look(Population(seed=4), [*honest, *forged]) < 2 * 340


def test_nobody_answers():
    population = Population(seed=1)
    population.saw(population.next_place(), [])
    assert population.peers == 0
