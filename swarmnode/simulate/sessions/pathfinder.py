"""Routes for simulated sessions: the live router's function, on the picture of the directory and the delays of the links."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from swarmnode.codec.messages import HopSpec
from swarmnode.net.interfaces import PeerId
from swarmnode.plan.routes.lattice import Route
from swarmnode.plan.routes.routing import find_route
from swarmnode.plan.routes.shortlist import shortlist
from swarmnode.plan.view import Span
from swarmnode.simulate.environment.world import World


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
        return self._world.measures.timed("route", lambda: self._route(client, place, avoid, keep))

    def _route(self, client: PeerId, place: int, avoid: Collection[PeerId], keep: Sequence[HopSpec]) -> Route:
        world = self._world
        picture = world.directory.view()
        view = shortlist(picture, client, Span(0, picture.units), frozenset(hop.peer for hop in keep))
        indexes = {peer.peer: world.by_id[peer.peer].index for peer in view.peers if peer.peer in world.by_id}
        between = self._kept(indexes) if view is picture else self._between(indexes)
        own = {(client, peer): 2 * world.links.delay_s(place, index) for peer, index in indexes.items()}
        seen = replace(view, rtt_s={**between, **own})
        return find_route(seen, client=client, avoid=avoid, keep=keep, config=world.settings.routing)

    def _kept(self, indexes: Mapping[PeerId, int]) -> dict[tuple[PeerId, PeerId], float]:
        """Round trips between all pairs, worked out anew when somebody came or went."""
        if self._revision != self._world.directory.revision:
            self._revision = self._world.directory.revision
            self._rtt_s = self._between(indexes)
        return self._rtt_s

    def _between(self, indexes: Mapping[PeerId, int]) -> dict[tuple[PeerId, PeerId], float]:
        delay_s, peers = self._world.links.delay_s, sorted(indexes.items())
        return {
            (one, other): 2 * delay_s(here, there)
            for number, (one, here) in enumerate(peers)
            for other, there in peers[:number]
        }
