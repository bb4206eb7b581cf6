"""Parts between replicas, among the other conversations on the same link."""

from __future__ import annotations

import asyncio

import pytest

from swarmnode.codec.frames import Frame
from swarmnode.codec.messages import VERSION, Body, Hello, Ready
from swarmnode.codec.training_messages import Part
from swarmnode.errors import PeerLost
from swarmnode.net.fake import FakeWorld, Path
from swarmnode.net.link import LinkConfig
from swarmnode.net.switchboard import Channel, Switchboard
from swarmnode.roles.training.mailbox import Mailbox
from tests.net.virtual import in_virtual_time

HELLO = Hello(VERSION, bytes(32), "test")
PROTOCOL = "/test/train/1"


class Replica:
    """A mailbox on the fake network; `others` hears the conversations that are not about parts."""

    def __init__(self, world: FakeWorld) -> None:
        self.network = world.join()
        self.peer = self.network.peer_id
        self.others: list[Body] = []
        config = LinkConfig(clock=asyncio.get_running_loop().time)
        self.switchboard = Switchboard(self.network, PROTOCOL, HELLO, config, accept=self._accept)
        self.mailbox = Mailbox(self.switchboard)
        self.mailbox.begin((1, 0, 0))

    def _accept(self, channel: Channel, frame: Frame, body: Body) -> None:
        if isinstance(body, Part):
            self.mailbox.hear(channel, frame, body)
            channel.on_frame = lambda frame, body: self.mailbox.hear(channel, frame, body)
        else:
            self.others.append(body)


async def pair() -> tuple[FakeWorld, Replica, Replica]:
    world = FakeWorld(seed=4)
    world.default_path = Path(latency_s=0.01)
    alice, bob = Replica(world), Replica(world)
    for one in (alice, bob):
        await one.switchboard.start()
    assert await alice.network.connect(await bob.network.addresses(), timeout_s=1)
    return world, alice, bob


def part(number: int) -> Part:
    return Part(1, 0, 0, 0, 0, number, False, ())


@in_virtual_time
async def test_parts_arrive_whether_they_come_before_or_after_they_are_asked_for() -> None:
    _, alice, bob = await pair()
    await alice.mailbox.send(bob.peer, part(0), [b"early"])
    await asyncio.sleep(1)
    assert bytes((await bob.mailbox.receive(alice.peer, part(0))).payload) == b"early"
    waiting = asyncio.ensure_future(bob.mailbox.receive(alice.peer, part(1)))
    await asyncio.sleep(1)
    await alice.mailbox.send(bob.peer, part(1), [b"late"])
    assert bytes((await waiting).payload) == b"late"


@in_virtual_time
async def test_who_waited_first_is_heard_though_another_conversation_began_meanwhile() -> None:
    """As a replica does that took no microbatch of a step, hears its sum, and contributes to the next one."""
    _, alice, bob = await pair()
    waiting = asyncio.ensure_future(alice.mailbox.receive(bob.peer, part(0)))
    await asyncio.sleep(1)
    other = await alice.switchboard.call(bob.peer, lambda _frame, _body: None, lambda _error: None)
    other.send(Ready(7))
    await bob.mailbox.send(alice.peer, part(0), [b"sum"])
    assert bytes((await waiting).payload) == b"sum"
    await alice.mailbox.send(bob.peer, part(1), [b"mine"])
    heard = await asyncio.wait_for(bob.mailbox.receive(alice.peer, part(1)), 5)
    assert bytes(heard.payload) == b"mine" and bob.others == [Ready(7)]


@in_virtual_time
async def test_who_waits_for_a_peer_that_dies_is_told() -> None:
    world, alice, bob = await pair()
    waiting = asyncio.ensure_future(alice.mailbox.receive(bob.peer, part(0)))
    await asyncio.sleep(1)
    world.kill(bob.peer)
    with pytest.raises(PeerLost):
        await asyncio.wait_for(waiting, 5)
