"""A peer's decisions about its place on the network; that they work is tested in tests/real."""

from __future__ import annotations

from swarmnode.peer.host_config import relays_of
from swarmnode.swarm.storage.swarmfile import Swarm


def test_each_door_is_one_relay_at_its_best_address() -> None:
    swarm = Swarm(
        bytes(32),
        "friends",
        bootstraps=(
            "/ip4/127.0.0.1/tcp/4001/p2p/12D3KooWone",
            "/ip4/192.168.1.2/tcp/4001/p2p/12D3KooWone",
            "/ip4/8.8.8.8/tcp/4001/p2p/12D3KooWone",
            "/ip4/8.8.4.4/tcp/4001/p2p/12D3KooWone",
            "/ip4/192.168.1.3/tcp/4001/p2p/12D3KooWtwo",
            "/ip4/8.8.8.8/tcp/4001/p2p/12D3KooWone/p2p-circuit/p2p/12D3KooWthree",
        ),
    )
    given = "/dns4/door.example.org/tcp/4001/p2p/12D3KooWfour"
    assert set(relays_of(swarm, [given])) == {
        given,
        "/ip4/8.8.8.8/tcp/4001/p2p/12D3KooWone",
        "/ip4/192.168.1.3/tcp/4001/p2p/12D3KooWtwo",
    }
