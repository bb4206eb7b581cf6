"""The simulator asks peers less often than they ask themselves live: the answers have to be the same."""

import random

import pytest

from swarmnode.plan.spans.span_placement import MovePolicy, reconsider
from swarmnode.plan.view import Span
from swarmnode.plan.virtual_clock import VirtualClock
from swarmnode.simulate.environment.peers import Peer, device_of
from swarmnode.simulate.environment.simulated_directory import Outlook, SimulatedDirectory
from swarmnode.simulate.results.measures import Measures
from swarmnode.swarm.peers.directory import DirectoryConfig
from swarmnode.swarm.records.announcement import State
from tests.simulate.worlds import model, scenario

UNITS = 12


def swarm(peers, seed, *, kinds=3):
    """Peers of a few kinds on random spans, all known to all."""
    chance = random.Random(seed)
    shape = model(UNITS)
    devices = [device_of(scenario([speed]), 0, shape) for speed in chance.sample([20.0, 50.0, 90.0, 160.0], kinds)]
    directory = SimulatedDirectory(VirtualClock(), UNITS, DirectoryConfig())
    found = []
    for index in range(peers):
        device, size = chance.choice(list(zip(devices, (3, 4, 6), strict=False)))
        start = chance.randrange(UNITS - size + 1)
        peer = Peer(index, f"p{index}", device, size, span=Span(start, start + size), state=State.READY)
        directory.announce(peer.view())
        found.append(peer)
    directory.know_now()
    return directory, found


def outlook(directory, move_policy=MovePolicy()):
    return Outlook(directory, Measures(10.0), move_policy)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("peers", [5, 14, 60])
def test_the_answers_are_those_that_peers_give_themselves(peers, seed):
    directory, everybody = swarm(peers, seed)
    asked = outlook(directory)
    for peer in everybody:
        assert asked.move(peer) == reconsider(directory.view(), peer.joiner(), MovePolicy()), peer


def test_in_a_large_swarm_it_is_seen_at_once_that_nobody_gains():
    directory, everybody = swarm(3000, 1)
    asked = outlook(directory)
    assert asked.all_stay()
    chosen = random.Random(0).sample(everybody, 20)
    assert all(reconsider(directory.view(), peer.joiner(), MovePolicy()) is None for peer in chosen)


def test_without_rebalancing_only_gaps_are_filled():
    for seed in range(12):
        directory, everybody = swarm(7, seed)
        moves = [outlook(directory, MovePolicy(for_gain=False)).move(peer) for peer in everybody]
        assert all(move is None or move.fills for move in moves)
        if directory.capacity_index.missing():
            assert any(moves)


def test_another_picture_is_looked_at_anew():
    directory, everybody = swarm(14, 0)
    asked = outlook(directory)
    before = [asked.move(peer) for peer in everybody]
    for peer in everybody[:5]:
        peer.state = State.OFFLINE
        directory.announce(peer.view())
    directory.know_now()
    after = [asked.move(peer) for peer in everybody[5:]]
    assert after != before[5:]
    assert after == [reconsider(directory.view(), peer.joiner(), MovePolicy()) for peer in everybody[5:]]
