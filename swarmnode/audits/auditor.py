"""Audits: some of a client's sessions are computed a second time, and the results of their hops compared with those of
replicas.

Audits run in the background after the answer. Sessions are chosen at random when they are over, so no hop can know in
advance. This module decides whether there is an audit. The audit itself is in `audit_case.py`, which needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from swarmnode.audits.referee import Referee, Replays
from swarmnode.config import ClientConfig
from swarmnode.metrics import table
from swarmnode.metrics.metric import Reading, Readings
from swarmnode.net.interfaces import PeerId
from swarmnode.net.links.switchboard import Switchboard
from swarmnode.peer.host import Host
from swarmnode.plan.audits.selection import AuditBudget, SessionCost, cost_of
from swarmnode.plan.view import PREFILL_GAIN, UNMEASURED_UNITS_PER_S
from swarmnode.serving.client.client_session import ClientSession
from swarmnode.serving.client.router import Route
from swarmnode.serving.client.session_spec import ServedWork, SessionSpec

OnFound = Callable[[PeerId, Route, SessionSpec], None]
"""Callback with the peer that computed falsely, a route on which it did, and the specification of that session."""

RESULTS = ("passed", "false", "doubt", "void")


class Auditor(Referee):
    """Auditor of one client's sessions. Call `take` with every session that is over."""

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
        self.on_found: OnFound = lambda _peer, _route, _spec: None

    def __repr__(self) -> str:
        return f"<Auditor {self._budget!r}, {dict(self.counts)}>"

    def readings(self) -> Readings:
        """Yield the number of audits for each result."""
        for result in RESULTS:
            yield Reading(table.AUDITS, self.counts[result], (result,))

    def take(self, session: ClientSession, ids: Sequence[int]) -> bool:
        """Draw whether `session`, which has produced `ids` (prompt and drawn tokens), is audited, and start the audit
        if so.

        Returns whether it is audited. The auditor then closes the session. Returns False also if too many audits run
        already or no hop of its route has another peer.
        """
        assert session.spec.sampling is not None
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
            self.on_found(case.accused.statement.peer, session.route, session.spec)

    def afford(self, cost: SessionCost) -> bool:
        """Spend `cost` of the budget for audits, if there is room for it beside the audits of own sessions. Returns whether there
        was."""
        return self._budget.afford(cost)

    async def close(self) -> None:
        await super().close()
        await self.replays.statements.close()
