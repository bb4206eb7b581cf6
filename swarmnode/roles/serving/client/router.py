"""Router: whom a session goes to. `directory_router.py` has the live one."""

from __future__ import annotations

from collections.abc import Sequence

from swarmnode.codec.messages import HopSpec
from swarmnode.net.interfaces import PeerId
from swarmnode.plan.routes.lattice import SessionSize
from swarmnode.roles.measuring.observed_latency import ObservedLatency

Route = tuple[HopSpec, ...]


class Router:
    """What a session needs to know of the swarm. The live one reads the directory.

    Into `observed_latency` goes how fast the peers of its routes turned out to be.
    """

    observed_latency: ObservedLatency

    def route(self, avoid: frozenset[PeerId], keep: Sequence[HopSpec], size: SessionSize) -> Route:
        """The best route now for a session of this size, without the peers in `avoid`, preferring the hops in `keep`.

        Raises NoRoute.
        """
        raise NotImplementedError

    def suspect(self, peer: PeerId, reason: str) -> None:
        """A peer failed us; the directory forgets it until it announces itself again."""
        raise NotImplementedError

    async def changed(self) -> None:
        """Wait until the picture of the swarm changes."""
        raise NotImplementedError
