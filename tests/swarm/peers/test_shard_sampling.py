"""Surveys of made-up swarms: how soon sizes are known, and that nobody is overlooked."""

from __future__ import annotations

import pytest

from swarmnode.swarm.peers import shards
from swarmnode.swarm.peers.directory import DirectoryConfig
from swarmnode.swarm.peers.shards import LARGE, SAMPLE, WIDE, ShardSampling
from tests.swarm.population import Population, Span
from tests.swarm.records.test_announcement import make


class Reader:
    """Somebody who surveys a population; `known` is everybody it has come across."""

    def __init__(self, population: Population, span: Span = (0, 8), name: str = "reader") -> None:
        self.population = population
        self.span = span
        self.sampling = ShardSampling(name)
        self.known: set[str] = set()
        self.looks: list[list[shards.Shard]] = []
        self.found: list[int] = []

    def read(self, look: list[shards.Shard]) -> set[str]:
        found = {shard: self.population.at.get(shard, []) for shard in look}
        there = {
            shard: [make(peer, span=self.population.spans[peer]) for peer in peers] for shard, peers in found.items()
        }
        if self.sampling.is_in_doubt(there):
            self.sampling.population = float(len(self.population.spans))
        self.sampling.saw(there)
        everybody = {peer for peers in found.values() for peer in peers}
        self.known |= everybody
        self.looks.append(look)
        self.found.append(len(everybody))
        return everybody

    def look(self, times: int = 1) -> None:
        for _ in range(times):
            self.read(self.sampling.next_shards(self.span))


@pytest.mark.parametrize("peers", [0, 1, 40, 64, 65, 120, 180, 250])
def test_a_small_swarm_is_known_whole_after_two_looks(peers):
    reader = Reader(Population.draw(peers, units=40) if peers else Population({}))
    reader.look(2)
    assert reader.known == set(reader.population.spans)
    assert not reader.sampling.large and reader.sampling.peers < max(LARGE, 1.6 * peers)


@pytest.mark.parametrize(("peers", "units"), [(400, 12), (3000, 40), (10_000, 40), (10_000, 130)])
def test_a_large_swarm_is_sampled_everywhere_and_most_at_home(peers, units):
    reader = Reader(Population.draw(peers, units))
    reader.look(80)
    true = reader.population.sizes
    assert reader.sampling.large
    assert reader.sampling.peers == pytest.approx(peers, rel=0.6)
    seen = [place for place in shards.places(units) if place in reader.sampling._sizes]
    assert len(seen) >= 0.8 * len([place for place in true if true[place]])
    for place in seen:
        assert true[place] / 1.6 - 10 < reader.sampling.size(place) < 1.6 * true[place] + 10
    holders = [
        sum(span[0] <= unit < span[1] for span in map(reader.population.spans.get, reader.known) if span)
        for unit in range(units)
    ]
    assert min(holders) >= 5, "routes and placement see several holders of every unit"
    home, away = min(holders[:8]), min(holders[8:])
    assert home >= away


def test_a_look_brings_a_bounded_number_of_records():
    reader = Reader(Population.draw(10_000, 40))
    reader.look(100)
    assert max(reader.found) <= 110
    assert max(map(len, reader.looks)) <= 7
    assert sum(look == [SAMPLE] for look in reader.looks) == 100 // 8 + 1
    assert reader.found.count(0) <= 10, "levels are found soon"


@pytest.mark.parametrize("seed", range(3))
def test_the_few_holders_of_a_rare_unit_are_all_found(seed):
    crowd = Population.draw(3000, 32, seed=seed).spans
    rare = {f"rare {number}": (33 + number % 3, 36 + number % 3) for number in range(5)}
    wide = {"whole model": (0, 40)}
    reader = Reader(Population({**crowd, **rare, **wide}), name=f"reader {seed}")
    reader.look()
    holders: set[str] = set()
    for place in (WIDE, *shards.places_of((35, 36))):
        holders |= reader.read(reader.sampling.whole(place))
    assert holders >= {*rare, *wide}


def test_a_place_that_has_grown_is_found_again():
    reader = Reader(Population.draw(400, 16))
    reader.look(20)
    reader.population = Population.draw(12_000, 16, seed=1)
    reader.look(40)
    assert all(
        reader.sampling.size(place) == pytest.approx(reader.population.sizes[place], rel=0.5) for place in ("0", "1")
    )


def test_a_swarm_that_has_shrunk_is_read_whole_again():
    reader = Reader(Population.draw(5000, 40))
    reader.look(30)
    reader.population = Population.draw(30, 40, seed=2)
    reader.look(20)
    assert not reader.sampling.large
    assert reader.known >= set(reader.population.spans)


@pytest.mark.parametrize("peers", [150, 200, 255, 257, 300, 380])
def test_near_the_threshold_writers_write_where_either_reader_looks(peers):
    population = Population.draw(peers, 24)
    writer, reader = ShardSampling("writer"), ShardSampling("reader")
    for estimate in (peers / 1.2, peers * 1.2):
        writer.peers = estimate
        for other in (peers / 1.2, peers * 1.2):
            reader.peers = other
            for peer, span in list(population.spans.items())[:50]:
                own = writer.own_shards(peer, span)
                looked = (
                    {shard.place for place in shards.places_of(span) for shard in reader.whole(place)}
                    if reader.large
                    else {shards.ALL}
                )
                assert looked & {shard.place for shard in own}


def test_nobody_writes_to_many_keys():
    sampling = ShardSampling("me")
    for peers in (10, 100, 300, 10_000):
        sampling.peers = peers
        assert all(len(sampling.own_shards(f"p{n}", (n % 32, n % 32 + 8))) <= 4 for n in range(200))
    assert len(sampling.own_shards("p", (0, 4096))) <= 2


def ground(share: float, count: int) -> list[str]:
    """Identities that were tried out until their digests were among the smallest."""
    found, number = [], 0
    while len(found) < count:
        number += 1
        if shards.digest_share(f"tried {number}") < share:
            found.append(f"tried {number}")
    return found


def test_forged_identities_do_not_make_a_small_swarm_large():
    """40 of them made 30 peers look like 171,721, and everybody spoke every 150 s instead of every 5."""
    honest, forged = [f"peer {number}" for number in range(30)], ground(1 / 1000, 40)
    assert shards.peers_from_sample([*honest, *forged]) > 10_000
    sampling = ShardSampling("reader")
    for _ in range(20):
        there = {SAMPLE: [make(peer) for peer in (*honest, *forged)]}
        assert sampling.is_in_doubt(there)
        sampling.population = 70.0  # the table has what there are
        sampling.saw(there)
    assert not sampling.large and DirectoryConfig().publish_period_s(sampling.peers) < 20


def test_the_size_grows_by_steps():
    population = Population.draw(3000, 40)
    reader = Reader(population)
    reader.look(40)
    before = reader.sampling.peers
    forged = ground(1 / 2000, 60)
    reader.sampling.population = 1e6
    reader.sampling.saw({SAMPLE: [make(peer) for peer in forged]})
    assert before <= reader.sampling.peers <= 2 * before


def test_in_a_large_swarm_some_reads_are_thorough():
    reader = Reader(Population.draw(3000, 40))
    thorough = []
    for _ in range(64):
        look = reader.sampling.next_shards(reader.span)
        thorough.append(reader.sampling.enough((), 0.0, calm=False) is None)
        reader.read(look)
    assert thorough[4:].count(True) == 4
