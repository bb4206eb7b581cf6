"""Audits: some of a client's sessions are computed a second time, and the results of their hops compared with those of
replicas.

Audits run in the background after the answer. Sessions are chosen at random when they are over, so no hop can know in
advance. This module decides whether there is an audit. The audit itself is in `audit_case.py`, which needs torch.

Reports of false peers: the client publishes its own findings and checks those of other clients itself.

A report alone never gets a peer shunned. It names a peer and a text that the peer computed falsely. The reader lets
that peer draw from the same beginning, in ordinary sessions, audits these as its own (`audit_case.py`) and believes
only their results. Readers check one report at a time, within the budget of audits. The author of a report that turns
out wrong is in doubt for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from swarmnode.audits.referee import RUN_S, Referee, Replays
from swarmnode.codec.body import HopSpec
from swarmnode.codec.messages import Mode
from swarmnode.codec.sampling import Sampling
from swarmnode.config import ClientConfig
from swarmnode.errors import NoRoute, SwarmnodeError
from swarmnode.links.switchboard import Switchboard
from swarmnode.metrics import table
from swarmnode.metrics.metric import Reading, Readings
from swarmnode.net.fair_share import Recent
from swarmnode.net.identity import verify
from swarmnode.net.interfaces import PeerId
from swarmnode.net.tasks import Tasks
from swarmnode.peer.host import Host
from swarmnode.plan.audits import AuditBudget, SessionCost, cost_of
from swarmnode.plan.routes.routing import SessionSize
from swarmnode.plan.view import PREFILL_GAIN, UNMEASURED_UNITS_PER_S, Span
from swarmnode.serving.client.client_session import ClientSession
from swarmnode.serving.client.router import Route, Router
from swarmnode.serving.client.session_spec import ServedWork, SessionSpec
from swarmnode.swarm.peers.record_validation import LIFE_S, report_key, report_subkey, reports_in
from swarmnode.swarm.records.statement import Report, Statement, sign_report
from swarmnode.tolerances import TRIALS

if TYPE_CHECKING:
    from swarmnode.audits.audit_case import AuditCase, HopAccount


OnFound = Callable[[PeerId, Route, SessionSpec], None]
"""Callback with the peer that computed falsely, a route on which it did, and the specification of that session."""

OnReceipt = Callable[[bytes, str], None]
"""Callback with a signed receipt of a text, or empty bytes and the reason why there is none"""

RESULTS = ("passed", "false", "doubt", "void")


class Auditor(Referee):
    """Auditor of one client's sessions. Call `sample` with every session that is over."""

    def __init__(
        self,
        host: Host,
        sessions: Switchboard,
        config: ClientConfig,
        on_over: Callable[[ServedWork], None],
    ) -> None:
        super().__init__(host, "audits")
        self.replays = Replays(host, sessions, config, on_over)
        self._budget = AuditBudget(config.audit_share)
        self.on_false_work: OnFound = lambda _peer, _route, _spec: None
        self.on_receipt: OnReceipt | None = None  # gets a receipt of each text from now on, which is then not audited

    def readings(self) -> Readings:
        """Yield the number of audits for each result."""
        for result in RESULTS:
            yield Reading(table.AUDITS, self.counts[result], (result,))

    def sample(self, session: ClientSession, ids: Sequence[int]) -> bool:
        """Draw whether `session`, which has produced `ids` (prompt and drawn tokens), is audited, and start the audit
        if so.

        Returns whether it is audited. The auditor then closes the session. Returns False also if too many audits run
        already or no hop of its route has another peer.
        """
        assert session.spec.sampling is not None
        if self.on_receipt is not None:
            self._tasks.spawn(self._issue(session, list(ids), self.on_receipt), "receipt")
            return True
        prompt = session.spec.sampling.prompt_length
        cost = self.cost(session.route, prompt, len(ids) - prompt)
        trust = min((self.standing.trust(hop.peer) for hop in session.route), default=0.0)
        drawn = self.dice.random() < self._budget.chance(cost, trust)
        if not drawn or self.is_busy or self.another_route(session.route) is None:
            return False
        self._budget.spend(cost)
        self._tasks.spawn(self._audit(session, list(ids)), f"of session {session.trace_id.hex()[:8]}")
        return True

    def cost(self, route: Route, prompt: int, drawn: int) -> SessionCost:
        """Estimate the cost of a session with `prompt` and `drawn` tokens from the speeds that the route's peers
        announce."""
        announced = self.host.directory.peers()
        known = [announced[hop.peer] for hop in route if hop.peer in announced]
        decode = min((peer.decode_units_per_s for peer in known), default=0.0) or UNMEASURED_UNITS_PER_S
        prefill = min((peer.prefill_units_per_s for peer in known), default=0.0) or PREFILL_GAIN * decode
        return cost_of(prompt, drawn, decode_s=1 / decode, prefill_s=1 / prefill)

    async def _audit(self, session: ClientSession, ids: list[int]) -> None:
        from swarmnode.audits.audit_case import AuditCase

        case = AuditCase(self, self.replays, session.settled, ids)
        try:
            await self.settle(case.audit(session))
        finally:
            await session.close()
        if case.accused is not None:
            self.on_false_work(case.accused.statement.peer, session.route, session.spec)

    async def _issue(self, session: ClientSession, ids: list[int], on_receipt: OnReceipt) -> None:
        """Make a receipt of a text while its hops hold their journals, and give it or the reason why there is none to
        `on_receipt`."""
        from swarmnode.audits.text_receipts import issue

        try:
            on_receipt(await asyncio.wait_for(issue(self.host, self.replays, session, ids), RUN_S), "")
        except (SwarmnodeError, asyncio.TimeoutError) as error:
            on_receipt(b"", f"no receipt of this text: {error or 'no answer in time'}")
        finally:
            await session.close()

    def afford(self, cost: SessionCost) -> bool:
        """Spend `cost` of the budget for audits, if there is room for it beside the audits of own sessions. Returns whether there
        was."""
        return self._budget.afford(cost)

    async def close(self) -> None:
        await super().close()
        await self.replays.statements.close()


log = logging.getLogger(__name__)

LOOK_S = 60.0
TABLE_TIMEOUT_S = 10.0
RUNS = 3  # of each text, at most
PROMPT_TOKENS, NEW_TOKENS = 16, 48
MAX_SEEN = 1024  # remembered reports


class Reports:
    """Publisher and reader of reports for one client; `router` finds routes over the whole model."""

    def __init__(self, auditor: Auditor, router: Router) -> None:
        self._auditor = auditor
        self._host = auditor.host
        self._router = router
        self._seen: Recent[tuple[PeerId, PeerId, float], None] = Recent(MAX_SEEN)  # author, accused, when
        on_crash = self._host.link_config.supervisor.ends_conversation
        self._tasks = Tasks("reports", on_crash=on_crash)
        self._telling = Tasks("telling", on_crash=on_crash)

    def start(self) -> None:
        """Start checking other clients' reports in the background."""
        self._tasks.spawn(self._check_forever(), "look")

    async def close(self) -> None:
        """Cancel publications and checks."""
        await self._telling.close()
        await self._tasks.close()

    # -- telling

    async def wait_published(self) -> None:
        """Wait until all reports about false work are published."""
        await self._telling.idle()

    def tell(self, accused: PeerId, route: Route, spec: SessionSpec) -> None:
        """Test `accused` in the background: draw random texts along `route`, and publish a report if it computes falsely."""
        self._telling.spawn(self._tell(accused, route, spec), f"tell of {accused}")

    async def _tell(self, accused: PeerId, route: Route, spec: SessionSpec) -> None:
        prompt = [self._auditor.dice.randrange(spec.width) for _ in range(PROMPT_TOKENS)]
        for _ in range(TRIALS):
            result, case = await self._try(prompt, route)
            if result == "false" and case is not None and case.accused is not None:
                if case.accused.statement.peer == accused:
                    await self._publish(case.ids, case.accused)
                return

    async def _try(self, prompt: Sequence[int], route: Route) -> tuple[str, AuditCase | None]:
        """Draw a text that begins with `prompt` along `route` and audit it. Returns the result, and the case or None if
        drawing failed."""
        from swarmnode.audits.audit_case import AuditCase

        auditor, replays, case = self._auditor, self._auditor.replays, None
        # A session that always draws the most likely token; the last one is drawn and not fed.
        sampling = Sampling(prompt_length=len(prompt), max_new_tokens=NEW_TOKENS)
        length = len(prompt) + NEW_TOKENS - 1
        spec = SessionSpec(Mode.RING, max_length=length, sampling=sampling, prompt_tokens=len(prompt) - 1)

        async def examine() -> str:
            nonlocal case
            drawing = replays.draw(session, prompt, len(prompt), lambda received: received.output.final)
            drawn = await asyncio.wait_for(drawing, RUN_S)
            case = AuditCase(auditor, replays, spec, [*prompt, *drawn.values()])
            return await case.audit(session)

        async with replays.session(route, spec) as session:
            return await auditor.settle(examine()), case

    async def _publish(self, ids: Sequence[int], said: HopAccount) -> None:
        """Publish a report that the author of the account `said` computed the text `ids` falsely."""
        host, now = self._host, self._host.clock.unix()
        report = Report(host.swarm.id, host.peer_id, said.statement.peer, now, PROMPT_TOKENS, tuple(ids), said.raws[-1])
        key, subkey = report_key(report.swarm), report_subkey(report.author, report.accused)
        storing = host.network.dht.store(
            key, subkey, sign_report(report, host.identity.sign), expires_at=report.at + LIFE_S
        )
        try:
            stored = await asyncio.wait_for(storing, TABLE_TIMEOUT_S)
            log.info("%r is %s", report, "in the table" if stored else "not taken by the table")
        except (SwarmnodeError, asyncio.TimeoutError) as error:
            log.info("%r could not be stored: %s", report, error or "no answer")

    # -- listening

    async def _check_forever(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.check_reports()
            except (SwarmnodeError, asyncio.TimeoutError) as error:
                log.debug("cannot read the swarm's reports: %s", error or "no answer")

    async def check_reports(self) -> None:
        """Read the reports in the DHT and check one new report: that of the most trusted author.

        Raises SwarmnodeError or asyncio.TimeoutError if the DHT does not answer.
        """
        swarm, standing = self._host.swarm.id, self._auditor.standing
        key = report_key(swarm)
        found = await asyncio.wait_for(self._host.network.dht.get([key]), TABLE_TIMEOUT_S)
        own, here, shunned = self._host.peer_id, self._host.directory.peers(), standing.shunned
        news = [
            (report, statement)
            for report, statement in reports_in(found.get(key, {}).values(), swarm, verify)
            if (report.author, report.accused, report.at) not in self._seen
            and report.author not in {own, *shunned, *standing.doubted}
            and report.accused not in {own, *shunned}
            and report.accused in here
        ]
        if not news:
            return
        report, statement = max(news, key=lambda one: (standing.trust(one[0].author), -one[0].at))
        await self._check_report(report, statement)

    async def _check_report(self, report: Report, statement: Statement) -> None:
        # A route on which the accused computes its units, without a second hop of any peer
        units, accused = Span(statement.start, statement.end), report.accused
        try:
            around = self._router.route(frozenset({accused}), (), SessionSize(PROMPT_TOKENS, NEW_TOKENS))
        except NoRoute:
            return  # until the next look
        before = [HopSpec(hop.peer, hop.start, min(hop.end, units.start)) for hop in around if hop.start < units.start]
        after = [HopSpec(hop.peer, max(hop.start, units.end), hop.end) for hop in around if hop.end > units.end]
        route = (*before, HopSpec(accused, units.start, units.end), *after)
        is_twice = len({hop.peer for hop in route}) < len(route)
        cost = self._auditor.cost(route, PROMPT_TOKENS, TRIALS * RUNS * NEW_TOKENS)
        if is_twice or not self._auditor.afford(cost):
            return  # until the next look
        self._seen[report.author, report.accused, report.at] = None
        results: list[str] = []
        while not self._auditor.standing.has_settled(report.author, accused, results):
            results.append((await self._try(report.ids[: report.prompt], route))[0])
        log.info("%r: %s", report, ", ".join(results))
