"""Switchboards on the fake network: one link per peer, many conversations on it, each with its own end."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from swarmnode.codec.body import VERSION, Body
from swarmnode.codec.frames import Frame
from swarmnode.codec.messages import End, Error, Hello, Output, Ready
from swarmnode.errors import ErrorCode, NetworkDown, PeerError, PeerLost, PeerRefused
from swarmnode.links.link_config import LinkConfig
from swarmnode.links.switchboard import Channel, Switchboard
from swarmnode.net.interfaces import Stream
from swarmnode.net.memory.medium import Path
from swarmnode.net.memory.network import FakeWorld
from tests.net.virtual import in_virtual_time

PROTOCOL = "/test/switchboard/1"
HELLO = Hello(VERSION, bytes(32), "test")
LATENCY_S = 0.01


class Peer:
    """A switchboard that notes which conversations others begin, and what is said in them."""

    def __init__(self, world: FakeWorld, hello: Hello = HELLO) -> None:
        self.network = world.join()
        self.id = self.network.peer_id
        self.accepted: list[Channel] = []
        self.heard: list[tuple[int, Body]] = []  # by the channel's number
        self.lost: list[tuple[int, PeerError]] = []
        self.lost_links: list[PeerError] = []
        self.switchboard = Switchboard(
            self.network, PROTOCOL, hello, LinkConfig(), accept=self._accept, on_peer_lost=self.lost_links.append
        )

    def _accept(self, channel: Channel, frame: Frame, body: Body) -> None:
        self.accepted.append(channel)
        channel.on_frame = lambda frame, body: self.heard.append((frame.channel, body))
        channel.on_lost = lambda error: self.lost.append((channel.number, error))
        self.heard.append((frame.channel, body))


class Talk:
    """The caller's side of one conversation."""

    def __init__(self) -> None:
        self.heard: list[Body] = []
        self.lost: list[PeerError] = []
        self.channel: Channel

    async def call(self, caller: Peer, peer: str) -> Channel:
        self.channel = await caller.switchboard.call(
            peer, lambda _frame, body: self.heard.append(body), self.lost.append
        )
        return self.channel


class Pair:
    """Alice, who calls, and Bob, who serves."""

    def __init__(self) -> None:
        self.world = FakeWorld(seed=2)
        self.world.default_path = Path(latency_s=LATENCY_S)
        self.alice, self.bob = Peer(self.world), Peer(self.world)
        self.streams = 0

    async def start(self) -> None:
        await self.bob.switchboard.start()
        serve = self.bob.switchboard._serve

        async def count(stream: Stream) -> None:
            self.streams += 1
            await serve(stream)

        await self.bob.network.serve(PROTOCOL, count)
        assert await self.alice.network.connect(await self.bob.network.addresses(), timeout_s=1)

    async def call(self) -> Talk:
        talk = Talk()
        await talk.call(self.alice, self.bob.id)
        return talk


async def pair() -> Pair:
    pair = Pair()
    await pair.start()
    return pair


async def settle() -> None:
    """Until everything that was sent has arrived and was answered."""
    await asyncio.sleep(10 * LATENCY_S)


@in_virtual_time
async def test_all_conversations_with_a_peer_share_one_link() -> None:
    both = await pair()
    talks = await asyncio.gather(*(both.call() for _ in range(5)))  # all at once: it is dialled once
    talks.append(await both.call())
    await settle()
    assert both.streams == 1
    assert sorted(talk.channel.number for talk in talks) == [1, 2, 3, 4, 5, 6]
    assert repr(both.alice.switchboard) == f"<Switchboard {PROTOCOL} outgoing=1 incoming=0>"
    assert repr(both.bob.switchboard) == f"<Switchboard {PROTOCOL} outgoing=0 incoming=1>"
    assert both.alice.switchboard.rtt_s(both.bob.id) is not None
    assert both.alice.switchboard.rtt_s("nobody") is None


@in_virtual_time
async def test_conversations_are_told_apart() -> None:
    both = await pair()
    one, two = await both.call(), await both.call()
    one.channel.send(Ready(1))
    two.channel.send(Ready(2))
    one.channel.send(Ready(11))
    await settle()
    assert both.bob.heard == [(1, Ready(1)), (2, Ready(2)), (1, Ready(11))]
    both.bob.accepted[1].send(Output(ids=(7,)))
    await settle()
    assert (one.heard, two.heard) == ([], [Output(ids=(7,))])


@in_virtual_time
async def test_the_first_frame_of_each_conversation_begins_it_at_the_other_side() -> None:
    both = await pair()
    talks = [await both.call() for _ in range(3)]
    for number, talk in enumerate(talks):
        talk.channel.send(Ready(number))
    await settle()
    assert [channel.number for channel in both.bob.accepted] == [1, 2, 3]
    for channel in both.bob.accepted:
        channel.send(Ready(10 * channel.number))
    await settle()
    assert [talk.heard for talk in talks] == [[Ready(10)], [Ready(20)], [Ready(30)]]
    assert repr(talks[0].channel) == f"<Channel 1 to {both.bob.id} open>"


@in_virtual_time
async def test_frames_of_a_conversation_that_is_over_are_dropped() -> None:
    both = await pair()
    talk = await both.call()
    talk.channel.send(Ready(1))
    await settle()
    there = both.bob.accepted[0]
    talk.channel.close()
    there.send(Ready(2))  # crosses END on the way
    await settle()
    there.send(Ready(3))
    talk.channel.send(Ready(4))  # its number is known to be over
    await settle()
    assert talk.heard == [] and talk.lost == []
    assert both.bob.heard == [(1, Ready(1)), (1, End())]
    assert len(both.bob.accepted) == 1
    assert not there.open and not talk.channel.open
    talk.channel.close()  # twice is once


@in_virtual_time
async def test_the_last_word_may_be_an_error() -> None:
    both = await pair()
    talk = await both.call()
    talk.channel.send(Ready(1))
    await settle()
    both.bob.accepted[0].close(Error(ErrorCode.BUSY, 3.0))
    await settle()
    assert talk.heard == [Error(ErrorCode.BUSY, 3.0)]
    assert talk.lost == []


@in_virtual_time
async def test_a_lost_link_reaches_each_of_its_conversations_and_no_other() -> None:
    both = await pair()
    third = Peer(both.world)
    await third.switchboard.start()
    assert await both.alice.network.connect(await third.network.addresses(), timeout_s=1)
    talks = [await both.call() for _ in range(3)]
    over = await both.call()
    over.channel.close()
    elsewhere = Talk()
    await elsewhere.call(both.alice, third.id)
    both.world.kill(both.bob.id)
    await settle()
    for talk in talks:
        assert [(type(error), error.peer) for error in talk.lost] == [(PeerLost, both.bob.id)]
        assert not talk.channel.open
        with pytest.raises(PeerLost):
            talk.channel.send(Ready(1))
    assert over.lost == [] and elsewhere.lost == [] and elsewhere.channel.open
    assert [error.peer for error in both.alice.lost_links] == [both.bob.id]


@in_virtual_time
async def test_the_accepting_side_hears_of_a_lost_link_too() -> None:
    both = await pair()
    for number in range(2):
        (await both.call()).channel.send(Ready(number))
    await settle()
    both.world.kill(both.alice.id)
    await settle()
    assert [(number, type(error)) for number, error in both.bob.lost] == [(1, PeerLost), (2, PeerLost)]
    assert repr(both.bob.switchboard).endswith("outgoing=0 incoming=0>")


@in_virtual_time
async def test_a_peer_that_hangs_is_noticed_soon_while_a_conversation_is_open() -> None:
    both = await pair()
    talk = await both.call()
    talk.channel.send(Ready(1))
    await settle()
    both.world.hang(both.bob.id)
    await asyncio.sleep(3.0)
    assert ["hangs" in str(error) for error in talk.lost] == [True]


@in_virtual_time
async def test_a_peer_that_hangs_for_a_moment_is_kept_while_nothing_is_expected_of_it() -> None:
    both = await pair()
    (await both.call()).channel.close()
    await settle()
    both.world.hang(both.bob.id)
    await asyncio.sleep(3.0)
    both.world.wake(both.bob.id)
    assert (await both.call()).channel.open
    assert both.streams == 1 and both.alice.lost_links == []


@in_virtual_time
async def test_after_a_loss_the_peer_is_called_anew() -> None:
    both = await pair()
    first = await both.call()
    first.channel.send(Ready(1))
    await settle()
    for line in list(both.bob.switchboard._incoming):
        line.link.abort()
    await settle()
    assert len(first.lost) == 1
    again = await both.call()
    again.channel.send(Ready(2))
    await settle()
    assert both.streams == 2
    assert both.bob.heard == [(1, Ready(1)), (1, Ready(2))]


@in_virtual_time
async def test_a_peer_of_another_swarm_refuses_the_call() -> None:
    both = await pair()
    stranger = Peer(both.world, Hello(VERSION, b"\1" * 32, "test"))
    await stranger.network.connect(await both.bob.network.addresses(), timeout_s=1)
    with pytest.raises(PeerRefused) as refused:
        await Talk().call(stranger, both.bob.id)
    assert refused.value.code == ErrorCode.WRONG_SWARM
    with pytest.raises(PeerLost):
        await Talk().call(both.alice, "nobody")


@in_virtual_time
async def test_one_caller_that_gives_up_does_not_end_the_dialling_of_another() -> None:
    both = await pair()
    impatient, patient = asyncio.ensure_future(both.call()), asyncio.ensure_future(both.call())
    await asyncio.sleep(LATENCY_S)
    impatient.cancel()
    assert (await patient).channel.open
    assert impatient.cancelled() and both.streams == 1


@in_virtual_time
async def test_closing_ends_links_in_order() -> None:
    both = await pair()
    talk = await both.call()
    talk.channel.send(Ready(1))
    await settle()
    await both.alice.switchboard.close()
    await settle()
    assert [str(error) for _, error in both.bob.lost] == [f"peer {both.alice.id} closed the link"]
    assert both.bob.lost_links == []  # in order: nobody is missing
    assert repr(both.alice.switchboard).endswith("outgoing=0 incoming=0>")


@in_virtual_time
async def test_closing_while_dialling_tells_the_caller() -> None:
    both = await pair()
    calling = asyncio.ensure_future(both.call())
    await asyncio.sleep(LATENCY_S)
    await both.alice.switchboard.close()
    with pytest.raises(NetworkDown, match="closing"):
        await calling


@pytest.mark.parametrize("closes_after_s", [0.0, 0.5 * LATENCY_S, 1.5 * LATENCY_S, 2.5 * LATENCY_S, 3.5 * LATENCY_S])
@in_virtual_time
async def test_nobody_is_left_on_a_board_that_has_closed(closes_after_s: float) -> None:
    """Whoever dials while it closes reaches the one that serves the protocol next."""
    pair = Pair()
    await pair.start()
    calling = asyncio.ensure_future(pair.call())
    await asyncio.sleep(closes_after_s)
    await pair.bob.switchboard.close()
    with contextlib.suppress(PeerError):
        await calling
    served: list[Channel] = []
    again = Switchboard(
        pair.bob.network, PROTOCOL, HELLO, LinkConfig(), accept=lambda channel, _frame, _body: served.append(channel)
    )
    await again.start()
    await settle()
    talk = await pair.call()
    talk.channel.send(Ready(1))
    await settle()
    assert served and not talk.lost
    await pair.alice.switchboard.close()
    await again.close()
