"""A toy swarm whose peers announce themselves and come and go, and clients who know them by their directories alone.

All of it on the fake network in virtual time: real servers, sessions, directories and routes, with arithmetic for layers.
"""

from __future__ import annotations

import asyncio
import pathlib
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from swarmnode.config import ClientConfig, ServerConfig
from swarmnode.decisions import DecisionLog
from swarmnode.errors import PeerError
from swarmnode.links.switchboard import Switchboard
from swarmnode.net.identity import verify
from swarmnode.net.interfaces import PeerId
from swarmnode.net.memory.medium import Path
from swarmnode.net.memory.network import FakeWorld
from swarmnode.peer.findings_record import Findings
from swarmnode.peer.paths import ObservedLatency, Paths
from swarmnode.plan.view import Span
from swarmnode.serving.client.client_session import SESSION_PROTOCOL, ClientSession
from swarmnode.serving.client.generation import GenerateOptions, Generation, RingStream
from swarmnode.serving.client.router import DirectoryRouter
from swarmnode.serving.drafting.drafter import Drafting, no_drafting
from swarmnode.swarm.peers.directory import Directory
from swarmnode.swarm.records.announcement import Place, ServingLoad, State, WorkSpeeds
from tests.peer.toy_swarm import HELLO, UNITS, Volunteer, link_config

EPOCH_S = 1_800_000_000.0  # unix time at the start of a test
CACHE_BYTES = 100_000


def unix_s() -> float:
    return EPOCH_S + asyncio.get_running_loop().time()


class LiveVolunteer(Volunteer):
    """A volunteer with a directory. `stop` leaves in order. It takes guesses if `drafting` makes some."""

    def __init__(
        self, world: FakeWorld, span: tuple[int, int], config: ServerConfig, drafting: Drafting = no_drafting
    ) -> None:
        super().__init__(world, *span, CACHE_BYTES, config)
        self.server.drafting = drafting
        self.directory = Directory(
            self.network, HELLO.swarm, verify=verify, sign=self.network.identity.sign, now=unix_s
        )

    async def join(self, door: str) -> None:
        await self.server.start()
        assert await self.network.connect([door], timeout_s=5)
        await self.directory.start()
        self.directory.announce(
            Place(state=State.READY, span=(self.start, self.end)),
            WorkSpeeds(decode_units_per_s=100.0),
            ServingLoad(
                cache_tokens_free=CACHE_BYTES,
                drafts=0 if self.server.drafting is no_drafting else self.server.config.max_drafts,
            ),
        )

    async def stop(self) -> None:
        self.directory.announce(Place(state=State.DRAINING))
        await self.server.drain(20.0)
        await self.end_tasks()
        await self.network.close()

    async def end_tasks(self) -> None:
        """What a killed process does not do any more."""
        await self.directory.close()
        await self.server.close()


class LiveClient:
    """Knows the swarm by its own directory."""

    def __init__(self, world: FakeWorld, config: ClientConfig) -> None:
        loop = asyncio.get_running_loop()
        self.network = world.join()
        self.directory = Directory(self.network, HELLO.swarm, verify=verify, now=unix_s)
        self.switchboard = Switchboard(
            self.network, SESSION_PROTOCOL, HELLO, link_config(), on_peer_lost=self._on_peer_lost
        )
        self.config = config
        host: Any = SimpleNamespace(
            observed_latency=ObservedLatency(clock=loop.time),
            directory=self.directory,
            paths=Paths(self.network.peer_id, lambda peer: self.directory.peers().get(peer), clock=loop.time),
            swarm=SimpleNamespace(manifest=None),
            standing=Findings(pathlib.Path("nowhere"), asyncio.get_running_loop().time),
            access_control=None,
            decisions=DecisionLog(unix_s),
        )
        self.router = DirectoryRouter(host, UNITS, Span(0, UNITS), ring=True)

    def _on_peer_lost(self, error: PeerError) -> None:
        if error.peer is not None:
            self.directory.suspect(error.peer, error.code.name)

    async def join(self, door: str) -> None:
        assert await self.network.connect([door], timeout_s=5)
        await self.directory.start()

    def ring(self, prompt: Sequence[int], count: int) -> RingStream:
        clock = asyncio.get_running_loop().time
        options = GenerateOptions(max_new_tokens=count)
        spec = options.spec(prompt)
        return RingStream(ClientSession(self.switchboard, self.router, spec, self.config, clock=clock), options)

    async def generate(self, prompt: Sequence[int], count: int) -> Generation:
        stream = self.ring(prompt, count)
        async for _ in stream:
            pass
        return stream.result


class LiveSwarm:
    """Volunteers by span and clients. A bootstrap peer, which never fails, is the door for all."""

    def __init__(self, seed: int, latency_s: float, config: ServerConfig, drafting: Drafting) -> None:
        self.world = FakeWorld(seed=seed, clock=unix_s)
        self.world.default_path = Path(latency_s=latency_s)
        self.random = random.Random(seed)
        self.door = self.world.join()
        self.volunteers: list[LiveVolunteer] = []
        self.clients: list[LiveClient] = []
        self._config = config
        self._drafting = drafting

    @classmethod
    async def start(
        cls,
        spans: Sequence[tuple[int, int]],
        clients: int,
        *,
        seed: int = 1,
        latency_s: float = 0.01,
        server: ServerConfig = ServerConfig(),
        client: ClientConfig = ClientConfig(),
        drafting: Drafting = no_drafting,
    ) -> LiveSwarm:
        swarm = cls(seed, latency_s, server, drafting)
        for span in spans:
            await swarm.add(span)
        swarm.clients = [LiveClient(swarm.world, client) for _ in range(clients)]
        for one in swarm.clients:
            await one.join(await swarm.address())
        await asyncio.sleep(3.0)  # of virtual time: everybody knows everybody
        for one in swarm.clients:
            await one.directory.refresh()
        return swarm

    async def address(self) -> str:
        return (await self.door.addresses())[0]

    async def add(self, span: tuple[int, int]) -> LiveVolunteer:
        """A new volunteer, ready."""
        one = LiveVolunteer(self.world, span, self._config, self._drafting)
        await one.join(await self.address())
        self.volunteers.append(one)
        return one

    async def kill(self, one: LiveVolunteer) -> None:
        self.volunteers.remove(one)
        self.world.kill(one.peer)
        await one.end_tasks()

    async def leave(self, one: LiveVolunteer) -> None:
        self.volunteers.remove(one)
        await one.stop()

    async def stop_for(self, one: LiveVolunteer, seconds: float) -> None:
        """As by SIGSTOP and SIGCONT."""
        self.world.hang(one.peer)
        await asyncio.sleep(seconds)
        self.world.wake(one.peer)

    def suspected(self) -> set[PeerId]:
        """Living volunteers whom a client does not count on."""
        living = {one.peer for one in self.volunteers}
        return {peer for client in self.clients for peer in living - set(client.directory.peers())}
