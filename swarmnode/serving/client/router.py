"""Router: the choice of peers for a session. `directory_router.py` has the live router."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol

from swarmnode.codec.body import HopSpec
from swarmnode.net.interfaces import PeerId
from swarmnode.peer.paths import ObservedLatency
from swarmnode.plan.routes.lattice import SessionSize

Route = tuple[HopSpec, ...]


class Router(Protocol):
    """Source of routes for a client's session; the live router reads the directory. Used on the event loop.

    Attributes:
        observed_latency: Measured speeds of the peers on routes, as sessions note them.
    """

    observed_latency: ObservedLatency

    @abstractmethod
    def route(self, avoid: frozenset[PeerId], keep: Sequence[HopSpec], size: SessionSize) -> Route:
        """Return the best route at this moment, without waiting.

        Args:
            avoid: Peers that must not be in the route.
            keep: Hops of an earlier route, preferred unless others are much better: their peers have caches.
            size: Positions of the session.

        Returns:
            Hops whose layers follow one another without a gap, over all layers of the router.

        Raises:
            NoRoute: Some layers have no holder outside `avoid`.
        """

    @abstractmethod
    def suspect(self, peer: PeerId, reason: str) -> None:
        """Leave a failed peer out of routes until it announces itself again, unless there is no route without it.

        Args:
            peer: The peer.
            reason: Name of the error, for the log of decisions.
        """

    def drafts(self, route: Route) -> int:
        """Return how many guesses all hops of `route` take in flight for one session; 0 if a hop takes none.

        Args:
            route: A route that this router returned.
        """
        return 0

    @abstractmethod
    async def changed(self) -> None:
        """Wait until the picture of the swarm changes, however long that takes. The caller may cancel it."""
