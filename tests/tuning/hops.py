"""Hops of a tuning in virtual time: tuning servers that each hold a whole tiny model, and the boards of owners and strangers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import torch

from swarmnode.codec.body import Body, HopSpec
from swarmnode.codec.frames import Frame
from swarmnode.codec.tuning_messages import TUNE_PROTOCOL, OpenAdapter
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.training.adapters.adapter_recipe import AdapterRecipe
from swarmnode.config import ServerConfig
from swarmnode.ledger import MemoryLedger
from swarmnode.links.link_config import LinkConfig
from swarmnode.links.switchboard import Channel, Switchboard
from swarmnode.net.memory.network import FakeWorld
from swarmnode.tuning.adapter_parts import TuningDevice, TuningPace, encode_recipe
from swarmnode.tuning.client.state_shapes import StateShapes
from swarmnode.tuning.client.tuned_route import TunedMicrobatch, TunedRoute
from swarmnode.tuning.server import TuningServer
from tests.compute.inline_executor import InlineExecutor
from tests.peer.toy_peer import HELLO, ToyPeer
from tests.tiny import TinyModel

UNITS = 4
IDS = torch.arange(16).reshape(2, 8)
RECIPE = encode_recipe(AdapterRecipe(rank=2, alpha=4.0, targets=("q_proj", "v_proj")))


class Hops:
    """Tuning servers `servers` of the peers `peers`, and a board of each of the peers `others`."""

    def __init__(self, folder: Path, hops: int, others: int) -> None:
        world = FakeWorld(seed=1)
        self.networks = [world.join() for _ in range(hops + others)]
        self.peers = [network.peer_id for network in self.networks[:hops]]
        self.others = [network.peer_id for network in self.networks[hops:]]
        self.executors = [InlineExecutor(lambda _item: 0.0) for _ in range(hops)]
        tiny = TinyModel.save(folder, layers=UNITS - 2)
        self.servers = []
        for network, executor in zip(self.networks, self.executors, strict=False):
            span = load_span(Checkpoint(tiny.folder), 0, UNITS, check=False)
            span.adapters.ledger = MemoryLedger(1 << 26)
            device = TuningDevice(span, executor, TuningPace(executor, 1.0, lambda: False))
            peer, config = ToyPeer(network, LinkConfig(), HELLO), ServerConfig(forgotten_s=60.0)
            self.servers.append(TuningServer(peer, [device], config, frozenset({0, 1})))
        self.calls: asyncio.Queue[tuple[Channel, Body]] = (
            asyncio.Queue()
        )  # conversations with others, and all their frames
        self.boards = [
            Switchboard(network, TUNE_PROTOCOL, HELLO, LinkConfig(), accept=self._accept)
            for network in self.networks[hops:]
        ]

    def _accept(self, channel: Channel, _frame: Frame, body: Body) -> None:
        channel.on_frame = lambda _frame, body: self.calls.put_nowait((channel, body))
        self.calls.put_nowait((channel, body))

    def opening(self, peers: Sequence[str], adapter: bytes = bytes(16), epoch: int = 1) -> OpenAdapter:
        """The request for an adapter on the whole model at `peers`, each with as many units."""
        size = UNITS // len(peers)
        route = tuple(HopSpec(peer, place * size, (place + 1) * size) for place, peer in enumerate(peers))
        return OpenAdapter(adapter, epoch, route, 0, RECIPE, 2, 8, 2)

    async def open(self, board: int, request: OpenAdapter) -> TunedRoute:
        shapes = StateShapes({unit: {} for unit in range(UNITS)})
        return await TunedRoute.open(self.boards[board], request, shapes, None)


async def loss_of(route: TunedRoute, number: int = 0) -> float:
    """The loss of a microbatch that learns, by the hops of a route."""
    found = await route.compute(0, [TunedMicrobatch(number, (IDS,), (IDS,), 1 / 14)])
    return found[number][0]


@asynccontextmanager
async def hops_of(folder: Path, hops: int, others: int) -> AsyncIterator[Hops]:
    scene = Hops(folder, hops, others)
    for listener in (*scene.servers, *scene.boards):
        await listener.start()
    for place, network in enumerate(scene.networks):
        for other in scene.networks[:place]:
            await network.connect(await other.addresses(), timeout_s=1)
    yield scene
    for board in scene.boards:
        await board.close()
    for server, executor in zip(scene.servers, scene.executors, strict=True):
        await server.close()
        await executor.close()
    await asyncio.sleep(1.0)
    for network in scene.networks:
        await network.close()
