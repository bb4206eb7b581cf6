"""A route whose hop lies or keeps its owner waiting, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

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
    TuneGradient,
    TuneInput,
    Updated,
)
from swarmnode.compress.codecs import encode_values
from swarmnode.errors import ErrorCode, PeerLost, ProtocolError
from swarmnode.links.link_config import LinkConfig
from swarmnode.links.switchboard import Channel, Switchboard
from swarmnode.net.memory.network import FakeNetwork, FakeWorld
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
HIDDEN = torch.ones(1, 8, 4)
ANSWERS = {
    "outputs of another shape": (HIDDEN[:, :7], HIDDEN),
    "outputs that are not finite": (HIDDEN * torch.nan, HIDDEN),
    "outputs twice": (HIDDEN, None),
    "gradients of another shape": (HIDDEN, HIDDEN[..., :3]),
    "gradients that are not finite": (HIDDEN, HIDDEN * torch.inf),
    "no gradients": (HIDDEN, None),
    "only a report": (HIDDEN, None),
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

    async with route_to(networks, accept) as (route, peer):
        if lie == "idle talk":
            with pytest.raises(PeerLost, match="no hop answers"):
                await asyncio.wait_for(route.compute(0, [TunedMicrobatch(0, (IDS,), (IDS,), 1.0)]), 2 * FIRST_S)
        else:
            with pytest.raises(ProtocolError, match="does not fit") as caught:
                await route.fetch(0)
            assert caught.value.peer == peer
    await asyncio.gather(*chatter)


@pytest.mark.parametrize("lie", ANSWERS)
@in_virtual_time
async def test_a_hop_whose_values_do_not_fit_is_left(lie: str) -> None:
    networks = [(world := FakeWorld(seed=1)).join(), world.join()]
    outputs, gradients = ANSWERS[lie]

    def hear(channel: Channel, body: Body) -> None:
        if isinstance(body, TuneInput):
            infos, payload = encode_values((outputs,))
            for _ in range(2 if lie == "outputs twice" else 1):
                channel.send(TuneInput(0, body.number, infos), payload=payload)
        elif isinstance(body, TuneGradient) and lie == "only a report":
            channel.send(TuneCounted(0, body.number))
        elif isinstance(body, TuneGradient):
            infos, payload = encode_values(() if gradients is None else (gradients,))
            channel.send(TuneGradient(0, body.number, tuple(True for _ in infos), infos), payload=payload)

    def accept(channel: Channel, _frame: Frame, _body: Body) -> None:
        channel.on_frame = lambda _frame, body: hear(channel, body)
        channel.send(AdapterOpened(1, 1))

    async with route_to(networks, accept) as (route, peer):
        with pytest.raises(ProtocolError) as caught:
            await route.forward(0, 0, (HIDDEN,), learns=True)
            await route.backward(0, 0, HIDDEN)
        assert caught.value.peer == (None if lie == "no gradients" else peer), "any hop may have dropped the microbatch"
        assert (caught.value.code == ErrorCode.NOT_FINITE) == ("not finite" in lie)


@asynccontextmanager
async def route_to(
    networks: list[FakeNetwork], accept: Callable[[Channel, Frame, Body], None]
) -> AsyncIterator[tuple[TunedRoute, str]]:
    """A route to one hop, and the hop's peer id."""
    hop = Switchboard(networks[0], TUNE_PROTOCOL, HELLO, LinkConfig(), accept=accept)
    owner = Switchboard(networks[1], TUNE_PROTOCOL, HELLO, LinkConfig())
    await hop.start()
    await networks[1].connect(await networks[0].addresses(), timeout_s=1)
    peer = networks[0].peer_id
    request = OpenAdapter(bytes(16), 1, (HopSpec(peer, 0, 2),), 0, b"\x80", 1, 8, 1)
    route = await TunedRoute.open(owner, request, StateShapes({0: {}, 1: {}}), None)
    yield route, peer
    await route.close()
    for board in (owner, hop):
        await board.close()
    for network in networks:
        await network.close()
