"""Common parts of the audits of sessions and of graph passes.

Some work of a client's peers is computed a second time by other peers, in the background. Results are counted, kept in
the peers' standing and noted as decisions.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from swarmnode.codec.audit_messages import AUDIT_PROTOCOL
from swarmnode.codec.body import HopSpec
from swarmnode.codec.messages import Want
from swarmnode.config import ClientConfig
from swarmnode.errors import NoRoute, SwarmnodeError
from swarmnode.links.switchboard import Switchboard
from swarmnode.net.interfaces import PeerId
from swarmnode.net.tasks import Tasks
from swarmnode.peer.host import Host
from swarmnode.peer.paths import ObservedLatency
from swarmnode.peer.questions import board_of
from swarmnode.plan.audits import Calibration, audit_route, second_route
from swarmnode.plan.routes.routing import SessionSize
from swarmnode.serving.client.client_session import ClientSession, WithAdapter, as_it_is
from swarmnode.serving.client.router import Route, Router
from swarmnode.serving.client.session_spec import Received, ServedWork, SessionSpec, ids_entry

log = logging.getLogger(__name__)

MAX_AUDITS = 4  # at once
RUN_S = 60.0  # for one run of a text


class FixedRoute(Router):
    """Router with one fixed route: if a hop fails, the session over it fails, too."""

    def __init__(self, route: Route, observed_latency: ObservedLatency) -> None:
        self.observed_latency = observed_latency
        self._route = route

    def route(self, avoid: frozenset[PeerId], retain: Sequence[HopSpec], size: SessionSize) -> Route:
        if avoid:
            raise NoRoute("a peer of the fixed route failed")
        return self._route

    def suspect(self, peer: PeerId, reason: str) -> None:
        log.info("peer %s failed in an audit: %s", peer, reason)

    async def changed(self) -> None:
        await asyncio.Event().wait()


class Replays:
    """Sessions of one client's audits, and the links for asking hops for their statements.

    `on_over` is called for these sessions as for any others: hops must not be able to tell them apart.
    """

    def __init__(
        self, host: Host, sessions: Switchboard, config: ClientConfig, on_over: Callable[[ServedWork], None]
    ) -> None:
        self.statements = board_of(host, AUDIT_PROTOCOL)
        self.calibration = Calibration()
        self._host = host
        self._sessions = sessions
        self.prompt_chunk_tokens = config.prompt_chunk_tokens
        self._config = replace(config, patience_s=0.0)
        self._on_over = on_over
        self.with_adapter: WithAdapter = as_it_is

    @asynccontextmanager
    async def session(self, route: Route, spec: SessionSpec) -> AsyncIterator[ClientSession]:
        """Open a session along `route` that is closed at the end of the context."""
        router = FixedRoute(route, self._host.observed_latency)
        clock = self._host.clock.monotonic
        session = ClientSession(
            self._sessions,
            router,
            spec,
            self._config,
            clock=clock,
            on_over=self._on_over,
            with_adapter=self.with_adapter,
        )
        try:
            yield session
        finally:
            await session.close()

    async def draw(
        self, session: ClientSession, ids: Sequence[int], prompt: int, is_last: Callable[[Received], bool]
    ) -> dict[int, int]:
        """Start `session` with `ids`, whose first `prompt` tokens are the prompt, and receive tokens until `is_last` is
        true of one.

        Returns the drawn tokens by position. Raises the error that ended the session if it ends earlier.
        """
        await session.start()
        size = self.prompt_chunk_tokens
        # All at once: when the last hop draws for a position, the position must be taken already.
        for start in range(0, len(ids), size):
            session.send(ids_entry(start, [ids[start : start + size]], Want.NOTHING), expect=prompt)
        drawn: dict[int, int] = {}
        while True:
            received = await session.receive()
            drawn[received.position] = received.output.ids[0]
            if is_last(received):
                return drawn


class Referee:
    """Base of a client's auditors: counts audits until `close`. `name` names their tasks in logs."""

    def __init__(self, host: Host, name: str) -> None:
        self.host = host
        self.standing = host.standing
        self.dice = random.SystemRandom()
        self.counts: Counter[str] = Counter()  # of audits, by result
        self._tasks = Tasks(name, on_crash=host.link_config.supervisor.ends_conversation)

    @property
    def is_busy(self) -> bool:
        """Whether the maximal number of audits is running."""
        return len(self._tasks) >= MAX_AUDITS

    def another_route(
        self,
        route: Sequence[HopSpec],
        *avoided: PeerId,
        same_bits: bool = False,
        kinds: Sequence[tuple[str, bytes] | None] = (),
    ) -> Route | None:
        """Draw other peers for the hops of `route`, none of them `avoided` or shunned, by `second_route`."""
        peers, avoid = self.host.directory.peers(), self.standing.shunned.union(avoided)
        return second_route(route, peers, self.dice, avoid=avoid, same_bits=same_bits, kinds=kinds)

    def audit_route(self, route: Sequence[HopSpec], *, moved: bool) -> tuple[Route | None, bool]:
        """Draw other peers to compute the text of a session over `route` again. Returns them, and whether digests decide."""
        peers, shunned = self.host.directory.peers(), self.standing.shunned
        return audit_route(route, peers, self.dice, avoid=shunned, moved=moved)

    async def settle(self, case: Coroutine[Any, Any, str]) -> str:
        """Await the result of an audit, count it and save the standings. Returns `void` if the audit failed."""
        try:
            result = await case
        except (SwarmnodeError, asyncio.TimeoutError) as error:
            log.info("an audit came to nothing: %s", error or "no answer in time")
            result = "void"
        self.counts[result] += 1
        await asyncio.to_thread(self.standing.save)
        return result

    async def idle(self) -> None:
        """Wait until no audit is in progress."""
        await self._tasks.idle()

    async def close(self) -> None:
        """Cancel the audits that are running."""
        await self._tasks.close()


def odd_one_out(votes: Sequence[bool | None]) -> int | None:
    """Return the index of the run that the third run contradicts if it confirms the other; None in all other cases."""
    return votes.index(False) if set(votes) == {False, True} else None
