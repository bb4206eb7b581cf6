"""The live router: routes found over the directory's view and the round trips that this peer measured."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from swarmnode.codec.messages import HopSpec
from swarmnode.net.interfaces import PeerId
from swarmnode.plan.cost import BYTES_PER_HIDDEN
from swarmnode.plan.routing import find_route
from swarmnode.plan.view import Span, view_of
from swarmnode.presence import Presence
from swarmnode.roles.client import Route, Router


class DirectoryRouter(Router):
    """Routes for the sessions of one client. `span` is the part of the model that the swarm computes for it."""

    def __init__(self, presence: Presence, units: int, span: Span, *, ring: bool) -> None:
        self.experience = presence.experience
        self._directory = presence.directory
        self._paths = presence.paths
        manifest = presence.swarm.manifest
        self._position_bytes = manifest.model.hidden * BYTES_PER_HIDDEN if manifest is not None else 0
        self._units = units
        self._span = span
        self._ring = ring

    def __repr__(self) -> str:
        return f"<DirectoryRouter over {self._span} {'ring' if self._ring else 'driven'}>"

    def route(self, avoid: frozenset[PeerId], keep: Sequence[HopSpec]) -> Route:
        view = view_of(
            self._units,
            self._directory.peers().values(),
            observer=self._directory.network.peer_id,
            rtt_s=self._paths.soundings.rtts_s(),
            coordinate=self._paths.coordinate,
            unit_s=self.experience.units_s(),
            position_bytes=self._position_bytes,
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
