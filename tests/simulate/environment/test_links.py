import numpy as np
import pytest

from swarmnode.simulate.environment.links import LAN_BANDWIDTH_BPS, LAN_DELAY_S, Links
from tests.simulate.worlds import scenario


def links(places=(0, 1, 2), **more):
    return Links(scenario([None] * 3, **more), places)


def test_a_message_takes_its_bytes_and_the_delay():
    assert links(bandwidth_bps=8e6, delay_s=0.25).send(10.0, 0, 1, 2e6) == pytest.approx(12.25)


def test_messages_of_one_path_follow_one_another():
    network = links(bandwidth_bps=8e6, delay_s=0.5)
    assert network.send(0.0, 0, 1, 1e6) == pytest.approx(1.5)
    assert network.send(0.0, 0, 1, 1e6) == pytest.approx(2.5)
    assert network.send(9.0, 0, 1, 1e6) == pytest.approx(10.5)


def test_all_paths_share_the_senders_uplink():
    network = links(bandwidth_bps=8e6, delay_s=0.0)
    assert [network.send(0.0, 0, receiver, 1e6) for receiver in (1, 2)] == pytest.approx([1.0, 2.0])
    assert network.send(0.0, 1, 2, 1e6) == pytest.approx(1.0)


def test_a_slow_path_does_not_hold_up_others():
    network = scenario([None] * 3, delay_s=0.0)
    network.bandwidth_bps.setflags(write=True)
    network.bandwidth_bps[:] = 8e8
    network.bandwidth_bps[0, 1] = 8e6
    paths = Links(network, (0, 1, 2))
    assert paths.send(0.0, 0, 1, 1e6) == pytest.approx(1.0)
    assert paths.send(0.0, 0, 2, 1e6) < 0.03


def test_what_a_peer_has_to_itself_takes_no_time():
    network = links()
    assert network.send(3.0, 1, 1, 1e12) == 3.0
    assert not network.bytes_sent


def test_bytes_are_counted_by_path():
    network = links()
    for _ in range(3):
        network.send(0.0, 0, 1, 100.0)
    network.send(0.0, 1, 0, 7.0)
    assert network.bytes_sent == {(0, 1): 300.0, (1, 0): 7.0}


def test_what_waits_to_leave_a_dead_peer_is_forgotten():
    network = links(bandwidth_bps=8e6, delay_s=0.0)
    network.send(0.0, 0, 1, 1e9)
    network.reset(0)
    assert network.send(1.0, 0, 1, 1e6) == pytest.approx(2.0)


def test_two_peers_at_one_place_are_as_near_as_its_nearest_neighbour():
    network = scenario([None] * 3, regions=["a", "a", "b"], delay_s=0.04, bandwidth_bps=5e6)
    paths = Links(network, (0, 0, 2, 2))
    assert (paths.delay_s(0, 1), paths.bandwidth_bps(0, 1)) == (0.04, 5e6)
    assert (paths.delay_s(2, 3), paths.bandwidth_bps(2, 3)) == (LAN_DELAY_S, LAN_BANDWIDTH_BPS)
    assert np.all(network.bandwidth_bps == 5e6)
