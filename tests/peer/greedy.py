"""A peer that takes all it can get of a toy swarm, by frames of its own."""

from __future__ import annotations

import asyncio

from swarmnode.codec.body import HopSpec
from swarmnode.codec.messages import Error, Mode, Open
from swarmnode.codec.sampling import Sampling
from swarmnode.errors import ErrorCode
from swarmnode.links.switchboard import Channel, Switchboard
from swarmnode.serving.client.client_session import SESSION_PROTOCOL, ClientSession
from swarmnode.serving.client.generation import GenerateOptions, RingStream
from tests.peer.toy_swarm import HELLO, ToySwarm, link_config

PROMPT = [5, 17, 3, 99, 42]
SAMPLING = Sampling(prompt_length=1, max_new_tokens=1)


class Greedy:
    """A peer that opens sessions at a swarm's volunteers, and hears what becomes of them."""

    def __init__(self, swarm: ToySwarm) -> None:
        self.swarm = swarm
        network = swarm.world.join()
        self.board = Switchboard(network, SESSION_PROTOCOL, HELLO, link_config())
        self.heard: list[object] = []
        self.network = network

    async def join(self) -> Greedy:
        assert await self.network.connect(await self.swarm.client.addresses(), timeout_s=1)
        return self

    async def open(self, number: int, max_length: int) -> Channel:
        """Open a session along the volunteers, who hold all units in order, and feed it nothing."""
        volunteers = self.swarm.volunteers
        route = tuple(HopSpec(one.peer, one.start, one.end) for one in volunteers)
        peer = volunteers[0].peer
        opened = Open(bytes([number] * 16), 1, route, 0, Mode.RING, 1, max_length, sampling=SAMPLING)
        channel = await self.board.call(peer, lambda _frame, body: self.heard.append(body), self.heard.append)
        channel.send(opened)
        await asyncio.sleep(0.1)
        return channel

    def stream(self, count: int) -> RingStream:
        options, clock = GenerateOptions(max_new_tokens=count), asyncio.get_running_loop().time
        swarm = self.swarm
        return RingStream(
            ClientSession(self.board, swarm.router, options.spec(PROMPT), swarm.config, clock=clock), options
        )

    @property
    def refusals(self) -> int:
        """How often it was told that there is no room."""
        return sum(isinstance(body, Error) and body.code == ErrorCode.BUSY for body in self.heard)
