import dataclasses

from swarmnode.plan.spans.span_placement import CapacityIndex
from swarmnode.plan.view import PeerView, Span
from swarmnode.plan.virtual_clock import VirtualClock
from swarmnode.simulate.environment.simulated_directory import SimulatedDirectory
from swarmnode.swarm.peers.directory import DirectoryConfig
from swarmnode.swarm.records.announcement import State

CONFIG = DirectoryConfig()


def peer(name, start=0, end=4, state=State.READY, **more):
    return PeerView(name, Span(start, end), state, 10.0, **more)


def started(*peers):
    clock = VirtualClock()
    directory = SimulatedDirectory(clock, 4, CONFIG)
    for one in peers:
        directory.announce(one)
    directory.start()
    return clock, directory


def names(directory):
    return [one.peer for one in directory.view().peers]


def test_news_are_known_a_read_period_later():
    clock, directory = started(peer("a"))
    directory.announce(peer("b"))
    clock.run(0.9 * CONFIG.read_s)
    assert names(directory) == ["a"]
    clock.run(1.1 * CONFIG.read_s)
    assert names(directory) == ["a", "b"]


def test_only_places_and_states_make_another_picture():
    clock, directory = started(peer("a"))
    revision = directory.revision
    directory.announce(peer("a", sessions=3))
    clock.run(2.0)
    assert directory.revision == revision
    assert directory.view().peers[0].sessions == 3
    directory.announce(peer("a", state=State.DRAINING))
    clock.run(4.0)
    assert directory.revision == revision + 1


def test_the_dead_stay_until_they_expire():
    clock, directory = started(peer("a"), peer("b"))
    directory.vanish("a")
    clock.run(CONFIG.publish_s * (CONFIG.life_factor - 1))
    assert names(directory) == ["a", "b"]
    clock.run(CONFIG.publish_s * CONFIG.life_factor + CONFIG.read_s)
    assert names(directory) == ["b"]


def test_a_goodbye_is_heard_at_once():
    clock, directory = started(peer("a"), peer("b"))
    directory.announce(peer("a", state=State.OFFLINE))
    clock.run(2 * CONFIG.read_s)
    assert names(directory) == ["b"]


def test_the_capacity_index_is_that_of_the_picture():
    clock, directory = started(peer("a"), peer("b", 0, 2), peer("c", 2, 4, State.JOINING))
    directory.announce(peer("b", 1, 3, State.LOADING))
    directory.announce(peer("c", state=State.OFFLINE))
    directory.announce(dataclasses.replace(peer("a"), state=State.DRAINING))
    clock.run(5.0)
    fresh = CapacityIndex(4, [peer("b", 1, 3)])
    assert directory.capacity_index.spans == fresh.spans
    assert (directory.capacity_index.supply_SE == fresh.supply_SE).all()
    assert directory.capacity_index.missing() == [0, 3]
    assert dict(directory.speeds) == {10.0: 1}
