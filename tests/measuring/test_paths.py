"""What a node says of its place, from links that did nothing but live."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from swarmnode.codec.body import VERSION
from swarmnode.codec.messages import Hello, Ready
from swarmnode.links.link_config import LinkConfig
from swarmnode.links.link_statistics import Coordinate
from swarmnode.links.switchboard import Switchboard
from swarmnode.net.addressing.reachability import Reachability
from swarmnode.net.memory.medium import Path
from swarmnode.net.memory.network import FakeWorld
from swarmnode.peer.paths import Paths
from swarmnode.swarm.records.announcement import VERSION as RECORD_VERSION
from swarmnode.swarm.records.announcement import Announcement, peer_digest, said
from tests.net.virtual import in_virtual_time

HELLO = Hello(VERSION, bytes(32), "test")


def announced(peer: str, paths: Paths) -> Announcement:
    return Announcement(RECORD_VERSION, bytes(32), peer, 1, 0.0, 1.0, 0.0, **said([paths.section()]))


@in_virtual_time
async def test_links_that_live_place_three_peers() -> None:
    world = FakeWorld(seed=3)
    networks = [world.join() for _ in range(3)]
    peers = [network.peer_id for network in networks]
    legs_s = {(0, 1): 0.010, (0, 2): 0.050, (1, 2): 0.055}
    for (one, other), latency_s in legs_s.items():
        world.set_path(peers[one], peers[other], Path(latency_s=latency_s))
    for network in networks[1:]:
        assert await network.connect(await networks[0].addresses(), timeout_s=1)
    known: dict[str, Announcement] = {}
    paths = [Paths(peer, known.get) for peer in peers]
    boards = []
    for network, own in zip(networks, paths, strict=True):
        config = LinkConfig(link_statistics=own.link_statistics, clock=asyncio.get_running_loop().time)
        boards.append(
            Switchboard(network, "/test/1", HELLO, config, accept=lambda channel, _frame, _body: channel.send(Ready(0)))
        )
        await boards[-1].start()
    for one, board in enumerate(boards):
        for other in peers[one + 1 :]:
            channel = await board.call(other, lambda _frame, _body: None, lambda _error: None)
            channel.send(Ready(0))
    for _ in range(60):
        known.update({peer: announced(peer, own) for peer, own in zip(peers, paths, strict=True)})
        await asyncio.sleep(1)
    for (one, other), latency_s in legs_s.items():
        estimate_ms = paths[one].coordinate.rtt_ms(paths[other].coordinate)
        assert estimate_ms == pytest.approx(2e3 * latency_s, rel=0.2)
        assert known[peers[one]].rtt_us[peer_digest(peers[other])] == pytest.approx(2e6 * latency_s, rel=0.01)
    for board in boards:
        await board.close()


def test_peers_that_announce_nothing_move_nobody() -> None:
    paths = Paths("me", {}.get)
    paths.link_statistics.round_trip("a client", 0.1)
    assert paths.coordinate == Coordinate()
    assert paths.section().rtt_us == {peer_digest("a client"): 100_000}


def test_what_is_measured_at_home_says_nothing_of_the_line_out_of_it() -> None:
    known: dict[str, Announcement] = {}
    paths = Paths("me", known.get)
    for peer, address in (("me", "5.6.7.8"), ("mate", "5.6.7.8"), ("far", "5.6.7.9")):
        known[peer] = msgspec.structs.replace(announced(peer, paths), addresses=(f"/ip4/{address}/tcp/1",))
    paths.link_statistics.sent("mate", 1e9)
    paths.link_statistics.sent("of no address", 2e9)
    assert paths.section().up_bps == 2e9
    paths.link_statistics.sent("far", 1e7)
    paths.link_statistics.received("mate", 1e9)
    assert paths.section().up_bps == 2e9 and paths.section().down_bps == 1e9, (
        "where there is nothing else, it is all there is"
    )
    del known["me"]
    assert not paths.link_statistics.at_home("of no address"), "of who has no address nothing is known"


def test_reachability_is_told_as_a_number() -> None:
    paths = Paths("me", {}.get)
    paths.check_reachability(["/ip4/10.0.0.2/tcp/1"], ["/ip4/9.9.9.9/tcp/1"], [])
    assert paths.section().reachability == Reachability.MAPPED == 2
