"""Referee: what audits of sessions and of passes share. Some work of a client's peers is computed once more by others, in the
background; what comes of that is counted, kept in the peers' standing, and noted as a decision."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any

from swarmnode.codec.messages import HopSpec
from swarmnode.decisions import Topic
from swarmnode.errors import SwarmnodeError
from swarmnode.net.interfaces import PeerId
from swarmnode.net.tasks import Tasks
from swarmnode.plan.audits.replicas import second_route
from swarmnode.roles.host import Host
from swarmnode.roles.serving.client.router import Route

MAX_AUDITS = 4  # at once

log = logging.getLogger(__name__)


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
