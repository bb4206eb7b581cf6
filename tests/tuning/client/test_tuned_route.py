"""A route whose hop lies or keeps its owner waiting, in virtual time."""

from __future__ import annotations

import asyncio

import pytest
import torch

from swarmnode.codec.body import Body, HopSpec
from swarmnode.codec.frames import Frame
from swarmnode.codec.tuning_messages import (
    TUNE_PROTOCOL,
    AdapterOpened,
    AdapterPiece,
    GetAdapter,
    OpenAdapter,
    TuneCounted,
    TuneInput,
    Updated,
)
from swarmnode.errors import PeerLost, ProtocolError
from swarmnode.net.links.link_config import LinkConfig
from swarmnode.net.links.switchboard import Channel, Switchboard
from swarmnode.net.memory.network import FakeWorld
from swarmnode.tuning.client.state_shapes import StateShapes
from swarmnode.tuning.client.tuned_route import FIRST_S, TunedMicrobatch, TunedRoute
from tests.net.virtual import in_virtual_time
from tests.peer.toy_peer import HELLO

IDS = torch.ones(1, 8, dtype=torch.int64)
LIES = {
    "nothing, again and again": AdapterPiece(0, 0, 0, 1 << 30),
    "another layer": AdapterPiece(0, 1, 0, 8),
    "more than the adapter has": AdapterPiece(0, 0, 0, 8),
}


@pytest.mark.parametrize("lie", [*LIES, "idle talk"])
@in_virtual_time
async def test_a_hop_that_lies_or_chatters_is_left(lie: str) -> None:
    """Frames that the owner does not wait for do not hide that the work stands still."""
    networks = [(world := FakeWorld(seed=1)).join(), world.join()]
    chatter: list[asyncio.Task[None]] = []

    async def chat(channel: Channel) -> None:
        while channel.open:
            channel.send(Updated(0))
            channel.send(TuneCounted(0, 0))
            await asyncio.sleep(5.0)

    def hear(channel: Channel, body: Body) -> None:
        if isinstance(body, GetAdapter):
            size = 0 if lie.startswith("nothing") else 9 if lie.startswith("more") else 8
            channel.send(LIES[lie], payload=[bytes(size)])
        elif isinstance(body, TuneInput):
            chatter.append(asyncio.ensure_future(chat(channel)))

    def accept(channel: Channel, _frame: Frame, _body: Body) -> None:
        channel.on_frame = lambda _frame, body: hear(channel, body)
        channel.send(AdapterOpened(1, 1))

    hop = Switchboard(networks[0], TUNE_PROTOCOL, HELLO, LinkConfig(), accept=accept)
    owner = Switchboard(networks[1], TUNE_PROTOCOL, HELLO, LinkConfig())
    await hop.start()
    await networks[1].connect(await networks[0].addresses(), timeout_s=1)
    peer = networks[0].peer_id
    request = OpenAdapter(bytes(16), 1, (HopSpec(peer, 0, 2),), 0, b"\x80", 1, 8, 1)
    route = await TunedRoute.open(owner, request, StateShapes({0: {}, 1: {}}), None)
    if lie == "idle talk":
        with pytest.raises(PeerLost, match="no hop answers"):
            await asyncio.wait_for(route.compute(0, [TunedMicrobatch(0, (IDS,), (IDS,), 1.0)]), 2 * FIRST_S)
    else:
        with pytest.raises(ProtocolError, match="does not fit") as caught:
            await route.fetch(0)
        assert caught.value.peer == peer
    await route.close()
    await asyncio.gather(*chatter)
    for board in (owner, hop):
        await board.close()
    for network in networks:
        await network.close()
