"""Replays: texts computed along fixed routes, in sessions that hops cannot tell from those moved to them after a fault."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from swarmnode.codec.audit_messages import AUDIT_PROTOCOL
from swarmnode.codec.messages import HopSpec, Want
from swarmnode.config import ClientConfig
from swarmnode.errors import NoRoute
from swarmnode.net.interfaces import PeerId
from swarmnode.net.links.switchboard import Switchboard
from swarmnode.plan.audits.tolerances import Calibration
from swarmnode.plan.routes.lattice import SessionSize
from swarmnode.roles.host import Host
from swarmnode.roles.measuring.observed_latency import ObservedLatency
from swarmnode.roles.serving.client.client_session import ClientSession
from swarmnode.roles.serving.client.ids_entry import ids_entry
from swarmnode.roles.serving.client.received import Received
from swarmnode.roles.serving.client.router import Route, Router
from swarmnode.roles.serving.client.served_work import ServedWork
from swarmnode.roles.serving.client.session_spec import SessionSpec

RUN_S = 60.0  # for one run of a text

log = logging.getLogger(__name__)


class FixedRoute(Router):
    """Router that knows one route: if it fails, so does the session over it."""

    def __init__(self, route: Route, observed_latency: ObservedLatency) -> None:
        self.observed_latency = observed_latency
        self._route = route

    def __repr__(self) -> str:
        return f"<FixedRoute of {len(self._route)} hops>"

    def route(self, avoid: frozenset[PeerId], keep: Sequence[HopSpec], size: SessionSize) -> Route:
        if avoid:
            raise NoRoute("a hop of the one route failed")
        return self._route

    def suspect(self, peer: PeerId, reason: str) -> None:
        log.info("peer %s failed in an audit: %s", peer, reason)

    async def changed(self) -> None:
        await asyncio.Event().wait()


class Replays:
    """Sessions of one client's audits, and the links on which it asks hops for their statements. `on_over` hears of the sessions as
    of any others: hops must not tell them apart."""

    def __init__(
        self, host: Host, sessions: Switchboard, config: ClientConfig, on_over: Callable[[ServedWork], None]
    ) -> None:
        self.statements = Switchboard(host.network, AUDIT_PROTOCOL, host.hello, host.link_config)
        self.calibration = Calibration()
        self._host = host
        self._sessions = sessions
        self._config = replace(config, patience_s=0.0)
        self._on_over = on_over

    def __repr__(self) -> str:
        return f"<Replays {self.calibration!r}>"

    @asynccontextmanager
    async def session(self, route: Route, spec: SessionSpec) -> AsyncIterator[ClientSession]:
        """A session along a route, which is closed in the end."""
        router = FixedRoute(route, self._host.observed_latency)
        clock = self._host.clock.monotonic
        session = ClientSession(self._sessions, router, spec, self._config, clock=clock, on_over=self._on_over)
        try:
            yield session
        finally:
            await session.close()

    async def draw(
        self, session: ClientSession, ids: Sequence[int], prompt: int, is_last: Callable[[Received], bool]
    ) -> dict[int, int]:
        """Begin a session with these ids, of which the first `prompt` are the prompt. Returns the tokens drawn, by position, up to
        the last one. Raises what ended the session before."""
        await session.start()
        size = self._config.prompt_chunk_tokens
        for start in range(0, len(ids), size):  # at once: what the last hop draws must find its position taken
            session.send(ids_entry(start, [ids[start : start + size]], Want.NOTHING), expect=prompt)
        drawn: dict[int, int] = {}
        while True:
            received = await session.receive()
            drawn[received.position] = received.output.ids[0]
            if is_last(received):
                return drawn
