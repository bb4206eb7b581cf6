"""One audit: every hop of a session says what it did, other peers do the same, and where they part a third decides.

The hops are asked for positions and by a seed that are chosen now. The other peers get the text as an ordinary session, which they
cannot tell from one that was moved to them after a fault: the same parameters, and inputs that are known already.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from swarmnode.codec.audit_messages import MAX_SKETCHED, SEED_BYTES, GetStatement
from swarmnode.codec.messages import HopSpec, Want
from swarmnode.errors import NoRoute, PeerRefused, ProtocolError
from swarmnode.net.interfaces import PeerId
from swarmnode.plan.audits.replicas import second_route
from swarmnode.plan.routes.lattice import SessionSize
from swarmnode.roles.measuring.observed_latency import ObservedLatency
from swarmnode.roles.serving.audit_server import HopAccount, fetch_account
from swarmnode.roles.serving.client import ClientSession, Route, Router, ids_entry
from swarmnode.roles.serving.comparison import TextRun, compare

if TYPE_CHECKING:
    from swarmnode.roles.serving.auditor import Auditor

log = logging.getLogger(__name__)

RUN_S = 60.0  # for one run of a text


class FixedRoute(Router):
    """One route and no other: where it fails, so does what goes over it."""

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


class AuditCase:
    """Of one session that has brought forth the last of `ids`, and is still open."""

    def __init__(self, auditor: Auditor, session: ClientSession, ids: Sequence[int]) -> None:
        assert session.spec.sampling is not None
        self._auditor = auditor
        self._session = session
        self._ids = ids
        self._prompt = session.spec.sampling.prompt_length
        held = len(ids) - 1  # positions: the last token is told and not fed
        window = auditor.dice.randrange(-(-held // MAX_SKETCHED))
        self._end = max(self._prompt, min(held, (window + 1) * MAX_SKETCHED))
        self._first = max(0, self._end - MAX_SKETCHED)
        self._seed = auditor.dice.randbytes(SEED_BYTES)

    def __repr__(self) -> str:
        return f"<AuditCase of {self._session!r} positions {self._first} to {self._end - 1}>"

    async def decide(self) -> str:
        """What came of it: `passed`, `false`, `doubt` or `void`; standings are kept. Raises what made it come to nothing."""
        session, standing = self._session, self._auditor.standing
        drawn = self._ids[max(self._prompt, self._first + 1) : self._end + 1]
        accounts = await asyncio.wait_for(self._ask(session.id, session.route), RUN_S)
        await session.close()  # its hops have said what they did
        original = TextRun(session.route, accounts, drawn)
        if self._contradicts(original):
            return "doubt"
        second = await self._run_again(session.route)
        if second is None or self._contradicts(second):
            return "void"
        found = compare(original, second, self._auditor.calibration)
        agreed = found.judgements if found.false_hop is None else found.judgements[:-1]
        for judgement, hop, other in zip(agreed, original.route, second.route, strict=False):
            for peer in {hop.peer, other.peer} if hop.peer != other.peer else ():
                standing.pass_audit(peer, judgement.compared)
        if found.false_hop is None:
            return "passed"
        return await self._who(original, second, found.false_hop)

    async def _who(self, original: TextRun, second: TextRun, index: int) -> str:
        """Two runs part at a hop: a third one, by other peers, says which of the two is false."""
        suspects = original.route[index].peer, second.route[index].peer
        if suspects[0] == suspects[1]:  # one time may be noise that nobody has measured
            if self._auditor.standing.doubt(suspects[0], f"session {self._session.trace_id.hex()}"):
                return self._shun(suspects[0], "contradicts itself again and again")
            return "doubt"
        third = await self._run_again(self._session.route, avoid=suspects[1])
        if third is not None and third.route[index].peer not in suspects and not self._contradicts(third):
            with_first, with_second = (self._agree_at(index, one, third) for one in (original, second))
            if with_first != with_second:
                return self._shun(suspects[with_first], "computes falsely")
        for one, other in (suspects, suspects[::-1]):
            if self._auditor.standing.doubt(one, other):
                log.warning("peer %s contradicts one peer after another: it is left out", one)
        return "doubt"

    def _agree_at(self, index: int, one: TextRun, other: TextRun) -> bool:
        false_hop = compare(one, other, self._auditor.calibration).false_hop
        return false_hop is None or false_hop > index

    def _shun(self, peer: PeerId, why: str) -> str:
        log.warning("peer %s %s: it is left out from now on", peer, why)
        self._auditor.standing.shun(peer)
        return "false"

    def _contradicts(self, run: TextRun) -> bool:
        """Whether two neighbours of a route say different things of what went between them: one of the two is to be doubted."""
        edge = run.contradiction(self._ids)
        if edge is None:
            return False
        one, other = run.route[edge - 1].peer, run.route[edge].peer  # into the first hop the last one feeds
        log.info("peers %s and %s contradict one another", one, other)
        if one != other:
            self._auditor.standing.doubt(one, other)
        self._auditor.standing.doubt(other, one)
        return True

    # -- asking

    async def _ask(self, session: bytes, route: Route) -> list[HopAccount]:
        """What every hop says of the judged positions. Raises what the first one raised that does not say it."""
        question = GetStatement(session, self._seed, self._first, self._end - self._first)
        asked = (self._fetch(hop.peer, question) for hop in route)
        return list(await asyncio.gather(*asked))

    async def _fetch(self, peer: PeerId, question: GetStatement) -> HopAccount:
        auditor = self._auditor
        try:
            return await fetch_account(auditor.statements, peer, question, auditor.host.swarm.id)
        except (PeerRefused, ProtocolError):
            auditor.standing.doubt(peer, f"session {self._session.trace_id.hex()}")  # who is there and does not answer
            raise

    async def _run_again(self, route: Route, avoid: PeerId | None = None) -> TextRun | None:
        """The text along another route. None where nobody else is there; raises what made it fail."""
        auditor = self._auditor
        avoided = auditor.standing.shunned | ({avoid} if avoid else frozenset())
        again = second_route(route, auditor.host.directory.peers(), auditor.dice, avoid=avoided)
        return None if again is None else await asyncio.wait_for(self._run(again), RUN_S)

    async def _run(self, route: Route) -> TextRun:
        auditor = self._auditor
        router = FixedRoute(route, auditor.host.observed_latency)
        clock = auditor.host.clock.monotonic
        session = ClientSession(auditor.sessions, router, self._session.spec, auditor.config, clock=clock)
        try:
            await session.start()
            size = auditor.config.prompt_chunk_tokens
            for start in range(0, self._end, size):  # at once: what the last hop draws must find its position taken
                entry = ids_entry(start, [self._ids[start : min(start + size, self._end)]], Want.NOTHING)
                session.send(entry, expect=self._prompt)
            drawn: dict[int, int] = {}
            while self._end not in drawn:
                received = await session.receive()
                drawn[received.position] = received.output.ids[0]
            accounts = await self._ask(session.id, route)
        finally:
            await session.close()
        return TextRun(route, accounts, [drawn[at] for at in sorted(drawn) if at > self._first])
