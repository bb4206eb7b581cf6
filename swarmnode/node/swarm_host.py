"""A host's machine: the bootstrap peer of a swarm, and a node that lends, with one life."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from swarmnode.metrics.metric import Readings
from swarmnode.node.bootstrap import Bootstrap
from swarmnode.node.node import Node, NodeConfig
from swarmnode.node.texts import Tell
from swarmnode.platform import MACHINE, Platform
from swarmnode.roles.host import HostConfig
from swarmnode.swarm.storage.swarmfile import Swarm


class SwarmHost:
    """`run` opens the door first, then lends the machine until `stop`; the door closes last, so that who asks finds somebody."""

    def __init__(
        self, swarm: Swarm, door: HostConfig, node: NodeConfig, tell: Tell, *, platform: Platform = MACHINE
    ) -> None:
        self._swarm = swarm
        self._door_config = door
        self._platform = platform
        self._door: Bootstrap | None = None
        self.node = Node(swarm, node, tell, platform=platform)

    def __repr__(self) -> str:
        return f"<SwarmHost {self._swarm!r}: {self.node!r}>"

    def readings(self) -> Readings:
        """What Prometheus may know: the node's figures, and before it is there the door's."""
        if self._door is not None and not self.node.has_joined:
            return self._door.host.readings()
        return self.node.readings()

    async def run(self, stop: asyncio.Event, opened: Callable[[Swarm, list[str]], Awaitable[None]]) -> None:
        """Live until `stop`; `opened` hears the swarm as its invites tell it now, and the addresses at which newcomers knock.

        Raises what `Bootstrap.start` and `Node.run` do.
        """
        self._door = await Bootstrap.start(
            self._swarm, self._door_config, file=self._swarm.file, platform=self._platform
        )
        try:
            await opened(self._door.host.swarm, await self._door.host.network.addresses())
            await self._door.watch(self.node.run(stop))
        finally:
            await self._door.close()
