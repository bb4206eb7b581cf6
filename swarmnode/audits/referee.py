"""Referee: what audits of sessions and of passes share. Some work of a client's peers is computed once more by others, in the
background; what comes of that is counted, kept in the peers' standing, and noted as a decision."""

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
from swarmnode.decisions import Topic
from swarmnode.errors import NoRoute, SwarmnodeError
from swarmnode.net.interfaces import PeerId
from swarmnode.net.links.switchboard import Switchboard
from swarmnode.net.tasks import Tasks
from swarmnode.peer.host import Host
from swarmnode.peer.local_peer import board_of
from swarmnode.peer.paths import ObservedLatency
from swarmnode.plan.audits.judgement import Calibration
from swarmnode.plan.audits.selection import second_route
from swarmnode.plan.routes.lattice import SessionSize
from swarmnode.serving.client.client_session import ClientSession
from swarmnode.serving.client.router import Route, Router
from swarmnode.serving.client.session_spec import Received, ServedWork, SessionSpec, ids_entry

log = logging.getLogger(__name__)

MAX_AUDITS = 4  # at once
RUN_S = 60.0  # for one run of a text


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
        self.statements = board_of(host, AUDIT_PROTOCOL)
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


class Referee:
    """Base of a client's auditors. `name` is that of its tasks in logs. Ended by `close`."""

    def __init__(self, host: Host, name: str) -> None:
        self.host = host
        self.standing = host.standing
        self.dice = random.SystemRandom()
        self.counts: Counter[str] = Counter()  # of audits, by result
        self._tasks = Tasks(name, on_crash=host.link_config.supervisor.ends_conversation)

    @property
    def is_busy(self) -> bool:
        """Whether as many audits are under way as may be."""
        return len(self._tasks) >= MAX_AUDITS

    def another_route(self, route: Sequence[HopSpec], *avoided: PeerId) -> Route | None:
        """Draw other peers for the hops of a route, none that is `avoided` or shunned; None if no hop has another one."""
        peers, avoid = self.host.directory.peers(), self.standing.shunned.union(avoided)
        return second_route(route, peers, self.dice, avoid=avoid)

    async def settle(self, case: Coroutine[Any, Any, str]) -> str:
        """Await the result of an audit, count it, and write standings down. Returns `void` if the audit failed."""
        try:
            result = await case
        except (SwarmnodeError, asyncio.TimeoutError) as error:
            log.info("an audit came to nothing: %s", error or "no answer in time")
            result = "void"
        self.counts[result] += 1
        await self.standing.keep()
        return result

    def doubt(self, peer: PeerId, other: str) -> bool:
        """Note that a peer contradicts `other`. Returns whether it is shunned now, with the doubts that there were."""
        shunned = self.standing.doubt(peer, other)
        self.note("leaves it out for a week" if shunned else "doubts it", peer, f"it contradicts {other}")
        if shunned:
            log.warning("peer %s contradicts one after another: it is left out from now on", peer)
        return shunned

    def doubt_both(self, one: PeerId, other: PeerId) -> None:
        """Note that two peers contradict one another, and nobody can tell which of them is wrong."""
        self.doubt(one, other)
        if one != other:
            self.doubt(other, one)

    def note(self, what: str, peer: PeerId, *facts: str) -> None:
        """Record what is decided about a peer, with the facts behind it and its trust."""
        trust = f"its standing is {self.standing.trust(peer):.2f} of 1"
        self.host.decisions.note(Topic.AUDIT, what, (*facts, trust), about=(peer,))

    async def idle(self) -> None:
        """Wait until no audit is under way."""
        await self._tasks.idle()

    async def close(self) -> None:
        """Give up audits that are under way."""
        await self._tasks.close()


def odd_one_out(votes: Sequence[bool | None]) -> int | None:
    """Return which of two a third peer contradicts alone; None if it contradicts or confirms both, or cannot tell of one."""
    return votes.index(False) if set(votes) == {False, True} else None
