"""One audit: every hop of a session says what it did, other peers do the same, and where they part a third decides.

The hops are asked for positions and by a seed that are chosen now. The other peers get the text as an ordinary session, which they
cannot tell from one that was moved to them after a fault: the same parameters, and inputs that are known already.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from swarmnode.codec.audit_messages import MAX_SKETCHED, SEED_BYTES
from swarmnode.codec.messages import HopSpec, Want
from swarmnode.decisions import Topic
from swarmnode.errors import NoRoute, PeerRefused, ProtocolError
from swarmnode.net.interfaces import PeerId
from swarmnode.plan.audits.replicas import second_route
from swarmnode.plan.routes.lattice import SessionSize
from swarmnode.roles.measuring.observed_latency import ObservedLatency
from swarmnode.roles.serving.audits.comparison import Comparison, TextRun, compare
from swarmnode.roles.serving.audits.hop_account import HopAccount, fetch_account
from swarmnode.roles.serving.client.client_session import ClientSession
from swarmnode.roles.serving.client.ids_entry import ids_entry
from swarmnode.roles.serving.client.router import Route, Router
from swarmnode.roles.serving.client.session_spec import SessionSpec

if TYPE_CHECKING:
    from swarmnode.roles.serving.audits.auditor import Auditor

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
    """Of one text `ids`, whose first tokens were a prompt, and which `spec` says how to draw.

    It is judged from the beginning on, as what a hop makes of a position depends on all before it: were a part left out, who lies
    there could make others look false behind it.
    """

    def __init__(self, auditor: Auditor, spec: SessionSpec, ids: Sequence[int]) -> None:
        assert spec.sampling is not None
        self.accused: HopAccount | None = None  # of whoever was found false, what it said in the first run
        self._auditor = auditor
        self._spec = spec
        self.ids = ids
        self._sampling = spec.sampling
        held = len(ids) - 1  # positions: the last token is told and not fed
        part = auditor.dice.randrange(-(-held // MAX_SKETCHED)) + 1
        self._end = max(self._sampling.prompt_length, min(held, part * MAX_SKETCHED))
        self._seed = auditor.dice.randbytes(SEED_BYTES)
        self._name = f"text {self._seed.hex()[:8]}"

    def __repr__(self) -> str:
        return f"<AuditCase of {self._name} up to position {self._end - 1}>"

    async def decide(self, original: TextRun) -> str:
        """What comes of it: `passed`, `false`, `doubt` or `void`; standings are kept. Raises what made it come to nothing."""
        if original.contradiction(self.ids) is not None:
            return self._contradicted(original)
        if (index := self._untold(original)) is not None:
            return self._concealed(original, index)
        second = await self._run_again(original.route)
        if second is None or second.contradiction(self.ids) is not None:
            return "void"  # and no doubt: what it drew may have come back to it sooner than what it was sent
        found = self._compare(original, second)
        agreed = found.judgements if found.false_hop is None else found.judgements[:-1]
        for judgement, hop, other in zip(agreed, original.route, second.route, strict=False):
            for peer in {hop.peer, other.peer} if hop.peer != other.peer else ():
                self._auditor.standing.pass_audit(peer, judgement.compared)
                self._note(
                    "finds it right", peer, f"{judgement.compared} positions of {self._name} were computed by two alike"
                )
        if found.false_hop is not None:
            return await self._who(original, second, found.false_hop)
        return "void" if found.unclear else "passed"

    async def _who(self, original: TextRun, second: TextRun, index: int) -> str:
        """Two runs part at a hop: a third one, by other peers, says which of the two is false."""
        suspects = original.route[index].peer, second.route[index].peer
        if suspects[0] == suspects[1]:  # one time may be noise that nobody has measured
            return "false" if self._doubt(suspects[0], self._name) else "doubt"
        third = await self._run_again(original.route, avoid=suspects[1])
        if third is not None and third.route[index].peer not in suspects and third.contradiction(self.ids) is None:
            agrees = [self._compare(run, third).agree_at(index) for run in (original, second)]
            if sorted(agrees, key=str) == [False, True]:
                self.accused = (original, second)[agrees.index(False)].accounts[index]
                return self._shun(self.accused.statement.peer, "computes falsely", third.route[index].peer)
        self._doubt(suspects[0], suspects[1])
        self._doubt(suspects[1], suspects[0])
        return "doubt"

    def _compare(self, one: TextRun, other: TextRun) -> Comparison:
        spec, calibration = self._spec, self._auditor.calibration
        return compare(one, other, lambda unit: spec.coarsest(unit, self._end), calibration, adapted=bool(spec.adapter))

    def _untold(self, run: TextRun) -> int | None:
        """The first hop that says that it sent in another codec than the client was told; None where there is none."""
        stated = (account.statement for account in run.accounts[:-1])
        return next(
            (
                index
                for index, said in enumerate(stated)
                if said.codec != self._spec.codec_into(said.end, said.sent.length)
            ),
            None,
        )

    def _concealed(self, run: TextRun, index: int) -> str:
        """Its choice went to the client by the hops before it: nobody can compute the text again, and one of them is to be
        doubted. Where hops were lost, one of them may have chosen and not told it."""
        if run.moved:
            return "void"
        one, other = run.route[index].peer, run.route[max(0, index - 1)].peer
        log.info("peer %s sent in another codec than was told", one)
        self._doubt(one, other if other != one else self._name)
        if one != other:
            self._doubt(other, one)
        return "doubt"

    def _contradicted(self, run: TextRun) -> str:
        """Two neighbours of a route say different things of what went between them: one of the two is to be doubted."""
        edge = run.contradiction(self.ids)
        assert edge is not None
        if edge in (0, len(run.route)) and run.moved:
            return "void"  # a token may have been drawn twice: who was lost told it to one of us
        if edge == len(run.route):  # between it and us is nobody
            log.info("peer %s did not sign for the tokens that it told", run.route[-1].peer)
            return "false" if self._doubt(run.route[-1].peer, self._name) else "doubt"
        one, other = run.route[edge - 1].peer, run.route[edge].peer  # into the first hop the last one feeds
        log.info("peers %s and %s contradict one another", one, other)
        self._doubt(one, other)
        if one != other:
            self._doubt(other, one)
        return "doubt"

    # -- what follows

    def _doubt(self, peer: PeerId, other: str) -> bool:
        """Whether it is shunned now, with the doubts that there were."""
        shunned = self._auditor.standing.doubt(peer, other)
        self._note("leaves it out for a week" if shunned else "doubts it", peer, f"it contradicts {other}")
        if shunned:
            log.warning("peer %s contradicts one after another: it is left out from now on", peer)
        return shunned

    def _shun(self, peer: PeerId, why: str, third: PeerId) -> str:
        log.warning("peer %s %s: it is left out from now on", peer, why)
        self._auditor.standing.shun(peer)
        self._note(
            "leaves it out for a week",
            peer,
            f"it {why}: {third} computed {self._name} as another peer did, and not as it",
        )
        return "false"

    def _note(self, what: str, peer: PeerId, *facts: str) -> None:
        trust = f"its standing is {self._auditor.standing.trust(peer):.2f} of 1"
        self._auditor.host.decisions.note(Topic.AUDIT, what, (*facts, trust), about=(peer,))

    # -- asking

    async def heard(self, session: ClientSession) -> TextRun:
        """What the hops of a session say that has brought forth the last of the tokens. It ends then."""
        await session.stay()
        accounts = await asyncio.wait_for(self._ask(session.id, session.route), RUN_S)
        await session.close()
        prompt = self._sampling.prompt_length
        drawn = {at: self.ids[at] for at in range(max(prompt, session.known), self._end + 1)}
        return TextRun(session.route, accounts, drawn, moved=session.epoch > 1)

    async def run(self, route: Route) -> TextRun:
        """The text along this route. Raises what made it fail."""
        return await asyncio.wait_for(self._run(route), RUN_S)

    async def _ask(self, session: bytes, route: Route) -> list[HopAccount]:
        """What every hop says. Raises what the first one raised that does not say it."""
        return list(await asyncio.gather(*(self._fetch(hop.peer, session) for hop in route)))

    async def _fetch(self, peer: PeerId, session: bytes) -> HopAccount:
        auditor, swarm = self._auditor, self._auditor.host.swarm.id
        try:
            account = await fetch_account(auditor.statements, peer, session, self._seed, self._end, swarm)
        except PeerRefused:
            auditor.standing.forfeit(peer)  # who is there and does not answer may have had to let go of it
            raise
        except ProtocolError:
            self._doubt(peer, self._name)
            raise
        announced = auditor.host.directory.peers().get(peer)
        if announced is not None and announced.number_format != account.statement.number_format:
            auditor.standing.forfeit(peer)
            raise ProtocolError("a statement in another number format than announced", peer=peer)
        return account

    async def _run_again(self, route: Sequence[HopSpec], avoid: PeerId | None = None) -> TextRun | None:
        """The text along another route. None where nobody else is there; raises what made it fail."""
        auditor = self._auditor
        avoided = auditor.standing.shunned | ({avoid} if avoid else frozenset())
        again = second_route(route, auditor.host.directory.peers(), auditor.dice, avoid=avoided)
        return None if again is None else await self.run(again)

    async def _run(self, route: Route) -> TextRun:
        auditor, prompt = self._auditor, self._sampling.prompt_length
        router = FixedRoute(route, auditor.host.observed_latency)
        sampling = msgspec.structs.replace(self._sampling, max_new_tokens=self._end + 1 - prompt)  # and then it stands
        spec = replace(self._spec, sampling=sampling, max_length=self._end)
        clock, on_over = auditor.host.clock.monotonic, auditor.on_over
        session = ClientSession(auditor.sessions, router, spec, auditor.config, clock=clock, on_over=on_over)
        try:
            await session.start()
            size = auditor.config.prompt_chunk_tokens
            for start in range(0, self._end, size):  # at once: what the last hop draws must find its position taken
                entry = ids_entry(start, [self.ids[start : min(start + size, self._end)]], Want.NOTHING)
                session.send(entry, expect=prompt)
            drawn: dict[int, int] = {}
            while self._end not in drawn:
                received = await session.receive()
                drawn[received.position] = received.output.ids[0]
            await session.stay()
            accounts = await self._ask(session.id, route)
        finally:
            await session.close()
        return TextRun(route, accounts, drawn)
