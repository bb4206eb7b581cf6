"""Audits: some of a client's sessions are computed once more, and what their hops did is compared with what replicas did.

After the answer, and in the background: which sessions is drawn when they are over, so that no hop can know before. What an audit
does is in `audit_case.py`, which needs torch; here it is decided whether there is one.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from swarmnode.codec.audit_messages import AUDIT_PROTOCOL
from swarmnode.config import ClientConfig
from swarmnode.errors import LocalError, SwarmnodeError
from swarmnode.metrics import table
from swarmnode.metrics.metric import Reading, Readings
from swarmnode.net.interfaces import PeerId
from swarmnode.net.links.switchboard import Switchboard
from swarmnode.net.tasks import Tasks
from swarmnode.plan.audits.budget import AuditBudget, SessionCost, cost_of
from swarmnode.plan.audits.replicas import second_route
from swarmnode.plan.audits.tolerances import Calibration
from swarmnode.plan.view import PREFILL_GAIN, UNMEASURED_UNITS_PER_S
from swarmnode.roles.host import Host
from swarmnode.roles.serving.client.client_session import ClientSession
from swarmnode.roles.serving.client.router import Route
from swarmnode.roles.serving.client.served_work import ServedWork
from swarmnode.roles.serving.client.session_spec import SessionSpec

log = logging.getLogger(__name__)

OnFound = Callable[[PeerId, Route, SessionSpec], None]
"""(who computes falsely, a route on which it did, what was computed)"""

RESULTS = ("passed", "false", "doubt", "void")
MAX_AUDITS = 4  # at once


class Auditor:
    """Of one client. `take` after every session; `close` at the end gives up what is under way."""

    def __init__(
        self,
        host: Host,
        sessions: Switchboard,
        config: ClientConfig,
        *,
        dice: random.Random | None = None,
        on_over: Callable[[ServedWork], None] = lambda _served: None,
    ) -> None:
        self.standing = host.standing
        self.dice = dice or random.SystemRandom()
        self.config = replace(config, patience_s=0.0)
        self.calibration = Calibration()
        self.sessions = sessions
        self.statements = Switchboard(host.network, AUDIT_PROTOCOL, host.hello, host.link_config)
        self.host = host
        self.on_over = on_over  # of the sessions that audits open: hops must not tell them from others
        self._budget = AuditBudget(config.audit_share)
        self._counts: Counter[str] = Counter()
        self._tasks = Tasks("audits", on_crash=host.link_config.supervisor.ends_conversation)
        self.on_found: OnFound = lambda _peer, _route, _spec: None

    def __repr__(self) -> str:
        return f"<Auditor {self._budget!r}, {dict(self._counts)}>"

    def readings(self) -> Readings:
        """What came of the audits so far."""
        for result in RESULTS:
            yield Reading(table.AUDITS, self._counts[result], (result,))

    def take(self, session: ClientSession, ids: Sequence[int]) -> bool:
        """A session has brought forth the last of these tokens. Whether it is audited: then it is closed from here."""
        assert session.spec.sampling is not None
        prompt = session.spec.sampling.prompt_length
        cost = self.cost(session.route, prompt, len(ids) - prompt)
        trust = min((self.standing.trust(hop.peer) for hop in session.route), default=0.0)
        drawn = self.dice.random() < self._budget.chance(cost, trust)
        if not drawn or len(self._tasks) >= MAX_AUDITS:
            return False
        if second_route(session.route, self.host.directory.peers(), self.dice, avoid=self.standing.shunned) is None:
            return False
        self._budget.spend(cost)
        self._tasks.spawn(self._audit(session, list(ids)), f"of session {session.trace_id.hex()[:8]}")
        return True

    def cost(self, route: Route, prompt: int, drawn: int) -> SessionCost:
        """Of a session, from the speeds that the route's peers announce."""
        announced = self.host.directory.peers()
        known = [announced[hop.peer] for hop in route if hop.peer in announced]
        decode = min((peer.decode_units_per_s for peer in known), default=0.0) or UNMEASURED_UNITS_PER_S
        prefill = min((peer.prefill_units_per_s for peer in known), default=0.0) or PREFILL_GAIN * decode
        return cost_of(prompt, drawn, decode_s=1 / decode, prefill_s=1 / prefill)

    async def _audit(self, session: ClientSession, ids: list[int]) -> None:
        from swarmnode.roles.serving.audits.audit_case import AuditCase

        case = AuditCase(self, session.settled, ids)

        async def examine() -> str:
            return await case.decide(await case.heard(session))

        try:
            await self.settle(examine())
        finally:
            await session.close()
        if case.accused is not None:
            self.on_found(case.accused.statement.peer, session.route, session.spec)

    async def settle(self, case: Coroutine[Any, Any, str]) -> str:
        """What comes of a case, which is counted and kept."""
        try:
            result = await case
        except (SwarmnodeError, asyncio.TimeoutError) as error:
            log.info("an audit came to nothing: %s", error or "no answer in time")
            result = "void"
        self._counts[result] += 1
        try:
            await asyncio.to_thread(self.standing.save)
        except LocalError as error:
            log.warning("%s", error)
        return result

    def afford(self, cost: SessionCost) -> bool:
        """Whether the budget has this for something else than the sessions' own audits; it is spent then."""
        return self._budget.afford(cost)

    async def idle(self) -> None:
        """Wait until no audit is under way."""
        await self._tasks.idle()

    async def close(self) -> None:
        """Give up what is under way."""
        await self._tasks.close()
        await self.statements.close()
