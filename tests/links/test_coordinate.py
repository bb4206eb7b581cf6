"""Vivaldi on the round trips of DT-FM's worldwide swarm (arXiv 2206.01288): eight peers in each of eight cities."""

from __future__ import annotations

import random
import statistics

import pytest

from swarmnode.links.link_statistics import Coordinate, Surveyor

# One-way delays in ms: Oregon, Virginia, Ohio, Tokyo, Seoul, London, Frankfurt, Ireland.
DELAY_MS = (
    (5, 67, 49, 96, 124, 136, 143, 124),
    (67, 5, 11, 143, 172, 76, 90, 67),
    (49, 11, 5, 130, 159, 86, 99, 77),
    (96, 143, 130, 5, 34, 210, 223, 199),
    (124, 172, 159, 34, 5, 238, 235, 228),
    (136, 76, 86, 210, 238, 5, 14, 12),
    (143, 90, 99, 223, 235, 14, 5, 24),
    (124, 67, 77, 199, 228, 12, 24, 5),
)
PEERS = [(city, number) for city in range(8) for number in range(8)]


class World:
    """Peers that measure round trips to a few others each, and hear the coordinates that those announce."""

    def __init__(self, seed: int, neighbours: int, access_ms: float = 0.0) -> None:
        self.random = random.Random(seed)
        self.surveyors = {peer: Surveyor((seed, peer)) for peer in PEERS}
        self.access_ms = {peer: self.random.expovariate(1 / access_ms) if access_ms else 0.0 for peer in PEERS}
        self.neighbours = {
            peer: self.random.sample([other for other in PEERS if other != peer], neighbours) for peer in PEERS
        }

    def rtt_ms(self, one, other) -> float:
        return 2 * DELAY_MS[one[0]][other[0]] + self.access_ms[one] + self.access_ms[other]

    def measure(self, rounds: int) -> None:
        """Every peer hears one answer of every neighbour per round."""
        for _ in range(rounds):
            for peer, surveyor in self.surveyors.items():
                for other in self.neighbours[peer]:
                    theirs = Coordinate.unpacked(self.surveyors[other].coordinate.packed())
                    surveyor.measured(theirs, self.rtt_ms(peer, other) * (1 + self.random.expovariate(20)) / 1e3)

    def errors(self) -> list[float]:
        """Relative errors of the estimates of all pairs, most of which never measured one another."""
        return [
            abs(self.surveyors[one].coordinate.rtt_ms(self.surveyors[other].coordinate) / self.rtt_ms(one, other) - 1)
            for one in PEERS
            for other in PEERS
            if one < other
        ]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_ordinary_traffic_places_the_cities(seed):
    world = World(seed, neighbours=12)
    world.measure(rounds=40)
    errors = world.errors()
    assert statistics.median(errors) < 0.2
    assert statistics.quantiles(errors, n=4)[-1] < 0.3


def test_heights_stand_for_slow_access_links():
    world = World(seed=4, neighbours=12, access_ms=40.0)
    world.measure(rounds=40)
    assert statistics.median(world.errors()) < 0.2
    slow = sorted(PEERS, key=lambda peer: world.access_ms[peer])
    heights = {peer: surveyor.coordinate.height_ms for peer, surveyor in world.surveyors.items()}
    mean = statistics.fmean
    assert mean(heights[peer] for peer in slow[-16:]) > 2 * mean(heights[peer] for peer in slow[:16])


def test_a_newcomer_finds_its_place_and_moves_nobody_far():
    world = World(seed=5, neighbours=12)
    world.measure(rounds=40)
    newcomer = PEERS[17]
    before = {peer: surveyor.coordinate for peer, surveyor in world.surveyors.items()}
    world.surveyors[newcomer] = Surveyor("new")
    world.measure(rounds=12)
    known = [other for other in PEERS if other != newcomer]
    errors = [
        abs(
            world.surveyors[newcomer].coordinate.rtt_ms(world.surveyors[other].coordinate)
            / world.rtt_ms(newcomer, other)
            - 1
        )
        for other in known
    ]
    assert statistics.median(errors) < 0.25
    moved = [before[peer].rtt_ms(world.surveyors[peer].coordinate) for peer in known]
    assert statistics.median(moved) < 40


def test_it_is_sure_of_itself_only_after_measurements():
    world = World(seed=6, neighbours=8)
    assert all(surveyor.coordinate.error == 1 for surveyor in world.surveyors.values())
    world.measure(rounds=30)
    assert statistics.median(surveyor.coordinate.error for surveyor in world.surveyors.values()) < 0.35


def test_as_announced():
    coordinate = Coordinate((1.26, -350.0, 0.0), 12.34, 0.213)
    assert coordinate.packed() == (13, -3500, 0, 123, 22)
    read = Coordinate.unpacked(coordinate.packed())
    assert read is not None and read.rtt_ms(coordinate) == pytest.approx(2 * 12.34, abs=0.2)
    assert Coordinate((1e9, 0, 0)).packed()[0] == 1 << 20, "a bound holds what a peer may announce"
    assert Coordinate.unpacked(()) is None
    assert Coordinate.unpacked(Coordinate().packed()) is None, "who knows nothing has no place"
