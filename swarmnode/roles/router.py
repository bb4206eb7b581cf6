"""The live router: routes found over the directory's view and the round trips that this peer measured."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from swarmnode.codec.messages import HopSpec
from swarmnode.net.interfaces import PeerId
from swarmnode.net.switchboard import Switchboard
from swarmnode.plan.routing import find_route
from swarmnode.plan.view import Span, view_of
from swarmnode.roles.client import Route, Router
from swarmnode.swarm.directory import Directory


class DirectoryRouter(Router):
    """Routes for the sessions of one client. `span` is the part of the model that the swarm computes for it."""

    def __init__(self, directory: Directory, switchboard: Switchboard, units: int, span: Span, *, ring: bool) -> None:
        self._directory = directory
        self._switchboard = switchboard
        self._units = units
        self._span = span
        self._ring = ring

    def __repr__(self) -> str:
        return f"<DirectoryRouter over {self._span} {'ring' if self._ring else 'driven'}>"

    def route(self, avoid: frozenset[PeerId], keep: Sequence[HopSpec]) -> Route:
        announced = self._directory.peers()
        rtts = {peer: self._switchboard.rtt_s(peer) for peer in announced}
        view = view_of(
            self._units,
            announced.values(),
            observer=self._directory.network.peer_id,
            rtt_s={peer: rtt_s for peer, rtt_s in rtts.items() if rtt_s is not None},
        )
        route = find_route(
            view,
            units=self._span,
            client=self._directory.network.peer_id,
            ring=self._ring,
            avoid=avoid,
            keep=keep,
        )
        return tuple(route.hops)

    def suspect(self, peer: PeerId, reason: str) -> None:
        self._directory.suspect(peer, reason)

    async def changed(self) -> None:
        await self._directory.changed(self._directory.revision)
        await asyncio.sleep(0)
