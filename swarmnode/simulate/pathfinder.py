"""Routes for simulated sessions: the live router's function, on the picture of the directory and the delays of the links."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from swarmnode.codec.messages import HopSpec
from swarmnode.net.interfaces import PeerId
from swarmnode.plan.lattice import Route
from swarmnode.plan.routing import find_route
from swarmnode.plan.view import View
from swarmnode.simulate.world import World


class Pathfinder:
    """Clients stand at the places of the scenario; round trips are known, as coordinates would tell them."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rtt_s: dict[tuple[PeerId, PeerId], float] = {}
        self._revision = -1

    def __repr__(self) -> str:
        return f"<Pathfinder at revision {self._revision}, {len(self._rtt_s)} round trips>"

    def route(self, client: PeerId, place: int, avoid: Collection[PeerId], keep: Sequence[HopSpec]) -> Route:
        """For a client whose index in the links is `place`. Raises NoRoute."""
        world = self._world
        view = world.directory.view()
        peers = {peer.peer: world.by_id[peer.peer].index for peer in view.peers if peer.peer in world.by_id}
        own = {(client, peer): 2 * world.links.delay_s(place, index) for peer, index in peers.items()}
        seen = View(view.units, view.peers, {**self._between(peers), **own})
        decide = lambda: find_route(  # noqa: E731
            seen, client=client, avoid=avoid, keep=keep, config=world.settings.routing
        )
        return world.measures.timed("route", decide)

    def _between(self, peers: Mapping[PeerId, int]) -> dict[tuple[PeerId, PeerId], float]:
        """Round trips between all pairs, worked out anew when somebody came or went."""
        if self._revision != self._world.directory.revision:
            self._revision = self._world.directory.revision
            links, names = self._world.links, sorted(peers)
            self._rtt_s = {
                (one, other): 2 * links.delay_s(peers[one], peers[other])
                for number, one in enumerate(names)
                for other in names[:number]
            }
        return self._rtt_s
