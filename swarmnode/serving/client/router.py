"""Router: the choice of peers for a session.

The live router finds routes with the directory's view and the round trips that this peer measured.
"""

from __future__ import annotations

import asyncio
import random
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from swarmnode.codec.body import HopSpec
from swarmnode.counting import counted, layers
from swarmnode.decisions import Topic
from swarmnode.errors import NoRoute
from swarmnode.net.interfaces import PeerId
from swarmnode.peer.host import Host
from swarmnode.peer.paths import ObservedLatency
from swarmnode.plan.cost import BYTES_PER_HIDDEN
from swarmnode.plan.routes import routing
from swarmnode.plan.routes.routing import SessionSize, find_route
from swarmnode.plan.view import Span, View, view_of
from swarmnode.swarm.peers.standing import EVERYBODY, Trust
from swarmnode.swarm.records.announcement import Announcement, State

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


class DirectoryRouter(Router):
    """Router for the sessions of one client. `span` is the part of the model that the swarm computes; only peers in
    `trust` take part."""

    def __init__(self, host: Host, units: int, span: Span, *, ring: bool, trust: Trust = EVERYBODY) -> None:
        self.observed_latency = host.observed_latency
        self._host = host
        manifest = host.swarm.manifest
        self._position_bytes = manifest.model.hidden * BYTES_PER_HIDDEN if manifest is not None else 0
        self._units = units
        self._span = span
        self._ring = ring
        self._trust = trust
        self._dice = random.Random(host.directory.network.peer_id)
        self._group = (lambda _peer: "") if host.access_control is None else host.access_control.group

    def route(self, avoid: frozenset[PeerId], keep: Sequence[HopSpec], size: SessionSize = SessionSize()) -> Route:
        avoid = avoid | self._host.standing.shunned
        try:
            return self._route(self._host.directory.peers(), avoid, keep, size)
        except NoRoute:
            # A peer that failed a while ago is better than no peer: a machine that was asleep is back before it
            # announces itself.
            suspects = self._host.directory.suspects()
            if not suspects:
                raise
            return self._route({**suspects, **self._host.directory.peers()}, avoid, keep, size)

    def _route(
        self, peers: Mapping[PeerId, Announcement], avoid: frozenset[PeerId], keep: Sequence[HopSpec], size: SessionSize
    ) -> Route:
        view = view_of(
            self._units,
            self._trusted(peers.values()),
            observer=self._host.directory.network.peer_id,
            rtt_s=self._host.paths.link_statistics.rtts_s(),
            coordinate=self._host.paths.coordinate,
            unit_s=self.observed_latency.units_s(),
            weights=self._host.standing.weights(peers),
            position_bytes=self._position_bytes,
        )
        own = self._host.directory.network.peer_id
        avoid |= self._newcomers_left_out(view, avoid) - {hop.peer for hop in keep}
        try:
            route = find_route(view, units=self._span, client=own, ring=self._ring, avoid=avoid, keep=keep, size=size)
        except NoRoute as error:
            self._note("finds no route", str(error), view, avoid)
            raise error if self._trust == EVERYBODY else NoRoute(f"among those you trust, {error}") from None
        what = "a token" if self._ring else "a pass"
        self._note("takes a route", f"{what} takes about {1000 * route.cost_s:.1f} ms on it", view, avoid, route.hops)
        return tuple(route.hops)

    def _note(self, what: str, result: str, view: View, avoid: frozenset[PeerId], hops: Sequence[HopSpec] = ()) -> None:
        """Record a routing decision, with the facts about the peers behind it, for `swarmnode why`."""
        peers, own = {peer.peer: peer for peer in view.peers}, self._host.directory.network.peer_id
        ready = sum(peer.state is State.READY and peer.span.units > 0 for peer in view.peers)
        left_out = avoid & peers.keys()
        facts = [
            result,
            f"{counted(ready, 'machine')} ready, {len(left_out)} left out (failed, busy, new, or wrong before)",
        ]
        for hop in hops:
            peer, rtt_s = peers[hop.peer], view.rtt_s.get((own, hop.peer))
            distance = "its distance is not known" if rtt_s is None else f"{rtt_s * 1e3:.1f} ms away"
            speed = f"{peer.assumed_units_per_s:,.4g} layers/s"
            facts.append(
                f"{hop.peer[-8:]}, {layers(hop.start, hop.end)}: {speed}, {counted(peer.sessions, 'text')} now, {distance}"
            )
        self._host.decisions.note(Topic.ROUTING, what, facts, about=tuple(hop.peer for hop in hops), units=self._span)

    def _newcomers_left_out(self, view: View, avoid: frozenset[PeerId]) -> frozenset[PeerId]:
        """Return newcomers to leave out of a session: none in a share of sessions, else those that established peers
        can replace."""
        if self._dice.random() < routing.SHARE:
            return frozenset()
        trust = {peer.peer: self._host.standing.trust(peer.peer) for peer in view.peers}
        return routing.dispensable(view, trust, avoid)

    def _trusted(self, peers: Iterable[Announcement]) -> list[Announcement]:
        return [peer for peer in peers if self._trust.covers(peer, self._group(peer.peer))]

    def suspect(self, peer: PeerId, reason: str) -> None:
        self._host.directory.suspect(peer, reason)

    def drafts(self, route: Route) -> int:
        peers = {**self._host.directory.suspects(), **self._host.directory.peers()}
        announced = [0 if (peer := peers.get(hop.peer)) is None else peer.drafts for hop in route]
        return min(announced, default=0)

    async def changed(self) -> None:
        self._host.directory.hurry()
        await self._host.directory.changed(self._host.directory.revision)
        await asyncio.sleep(0)
