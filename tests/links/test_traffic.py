"""Traffic: the bytes of all links, those that are over too."""

from __future__ import annotations

import asyncio

import pytest

from swarmnode.codec.body import VERSION
from swarmnode.codec.messages import Hello, Ready
from swarmnode.links.link_config import LinkConfig
from swarmnode.links.link_statistics import Traffic, protocol_name
from swarmnode.links.switchboard import Switchboard
from swarmnode.metrics import table
from swarmnode.metrics.metric import Histogram
from swarmnode.net.memory.medium import Path
from swarmnode.net.memory.network import FakeWorld
from tests.net.virtual import in_virtual_time

PROTOCOL = "/swarmnode/test/1"
HELLO = Hello(VERSION, bytes(32), "test")
LATENCY_S = 0.02


class Peer:
    """One end, with traffic of its own."""

    def __init__(self, world: FakeWorld) -> None:
        self.network = world.join()
        self.traffic = Traffic()
        config = LinkConfig(traffic=self.traffic, clock=asyncio.get_running_loop().time)
        self.switchboard = Switchboard(
            self.network, PROTOCOL, HELLO, config, accept=lambda channel, _frame, _body: channel.send(Ready(0))
        )

    def bytes(self) -> tuple[int, int]:
        """Sent and received."""
        return self.traffic.sent_bytes["test"], self.traffic.received_bytes["test"]


@in_virtual_time
async def test_what_one_sends_the_other_receives_and_links_that_are_over_stay_counted() -> None:
    world = FakeWorld(seed=3)
    world.default_path = Path(latency_s=LATENCY_S)
    alice, bob = Peer(world), Peer(world)
    await bob.switchboard.start()
    assert await alice.network.connect(await bob.network.addresses(), timeout_s=1)
    channel = await alice.switchboard.call(bob.network.peer_id, lambda _frame, _body: None, lambda _error: None)
    channel.send(Ready(7))
    await asyncio.sleep(1.0)
    await alice.switchboard.close()
    await asyncio.sleep(1.0)
    sent, received = alice.bytes()
    assert sent > 50 and received > 50
    assert bob.bytes() == (received, sent)
    told = {(reading.metric, reading.labels): reading.value for reading in alice.traffic.readings()}
    assert told[table.LINK_BYTES, ("test", "sent")] == sent
    round_trips = told[table.ROUND_TRIP_SECONDS, ("test",)]
    assert isinstance(round_trips, Histogram)
    assert round_trips.sum / round_trips.count == pytest.approx(2 * LATENCY_S)


def test_protocols_are_known_by_their_short_names() -> None:
    assert protocol_name("/swarmnode/session/1") == "session"
    assert protocol_name("/ipfs/id/1.0.0") == "ipfs", "bounded, whatever it is"
