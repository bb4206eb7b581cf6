"""Audits of passes: some are computed once more by another peer, and where the two differ a third says which of them is alone.

In the background, once the pass has gone on: a hop cannot know which of its passes is asked of others, nor they that it was.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Awaitable, Callable, Sequence

import torch
from torch import Tensor

from swarmnode.codec.messages import HopSpec
from swarmnode.decisions import Topic
from swarmnode.errors import LocalError, NetworkDown, PeerError
from swarmnode.ledger import Account, MemoryLedger
from swarmnode.net.interfaces import PeerId
from swarmnode.net.tasks import Tasks
from swarmnode.plan.audits.replicas import second_route
from swarmnode.roles.host import Host
from swarmnode.swarm.peers.standing import DOUBTS

Values = tuple[Tensor, ...]
Ask = Callable[[HopSpec, Values, int], Awaitable[Values]]
"""What one peer makes of values, for a batch"""

MAX_AUDITS = 4  # at once
MAX_BYTES = 64 << 20  # of the values of one: what is larger is not kept for it
TOLERANCE = {torch.float32: 0.03, torch.float64: 0.03}  # relative: TF32's products are good to 1e-3
COARSE_TOLERANCE = 0.15  # of bfloat16 and float16

log = logging.getLogger(__name__)


class PassAuditor:
    """Of one client: `share` of the passes at each hop are computed again, by `ask`. Ended by `close`."""

    def __init__(self, host: Host, ask: Ask, share: float, *, dice: random.Random | None = None) -> None:
        self._host = host
        self._ask = ask
        self._share = share
        self._dice = dice or random.SystemRandom()
        self._tasks = Tasks("audits of passes", on_crash=host.link_config.supervisor.ends_conversation)

    def __repr__(self) -> str:
        return f"<PassAuditor of {self._share:.0%}, {len(self._tasks)} under way>"

    def take(self, hop: HopSpec, given: Values, computed: Values, batch: int) -> None:
        """A hop has made this of that. Perhaps it is audited."""
        size_bytes = sum(value.nbytes for value in (*given, *computed))
        if self._dice.random() >= self._share or len(self._tasks) >= MAX_AUDITS or size_bytes > MAX_BYTES:
            return
        second = self._another(hop)
        if second is not None:
            ledger: MemoryLedger = self._host.link_config.ledger
            held = ledger.count(Account.MESSAGES, size_bytes)
            task = self._tasks.spawn(self._audit(hop, second, given, computed, batch), f"of peer {hop.peer}")
            task.add_done_callback(lambda _: held.release())

    async def idle(self) -> None:
        """Wait until no audit is under way."""
        await self._tasks.idle()

    async def close(self) -> None:
        """Give up what is under way."""
        await self._tasks.close()

    def _another(self, hop: HopSpec, *more: HopSpec) -> HopSpec | None:
        """Somebody else who holds its units, none of `more`."""
        avoid = self._host.standing.shunned | {one.peer for one in more}
        peers = {peer: said for peer, said in self._host.directory.peers().items() if peer not in avoid}
        route = second_route((hop,), peers, self._dice)
        return None if route is None else route[0]

    async def _audit(self, hop: HopSpec, second: HopSpec, given: Values, computed: Values, batch: int) -> None:
        try:
            await self._decide(hop, second, given, computed, batch)
            await asyncio.to_thread(self._host.standing.save)
        except (PeerError, NetworkDown) as error:
            log.info("an audit of peer %s came to nothing: %s", hop.peer, error)
        except LocalError as error:
            log.warning("%s", error)

    async def _decide(self, hop: HopSpec, second: HopSpec, given: Values, computed: Values, batch: int) -> None:
        again = await self._ask(second, given, batch)
        if await asyncio.to_thread(alike, computed, again):
            for peer in (hop.peer, second.peer):
                self._host.standing.pass_audit(peer, batch)
            return
        third = self._another(hop, second)
        votes = [False, False] if third is None else await self._votes(third, given, batch, (computed, again))
        if third is None or sum(votes) != 1:
            self._doubt(hop.peer, second.peer)
            self._doubt(second.peer, hop.peer)
            return
        alone = (hop, second)[votes.index(False)].peer  # once may be chance, where a module decides between equals
        self._doubt(alone, f"a pass, {secrets.token_hex(4)}")

    async def _votes(self, third: HopSpec, given: Values, batch: int, others: Sequence[Values]) -> list[bool]:
        """Whether a third peer computes what each of the others has."""
        deciding = await self._ask(third, given, batch)
        return [await asyncio.to_thread(alike, other, deciding) for other in others]

    def _doubt(self, peer: PeerId, other: str) -> None:
        if self._host.standing.doubt(peer, other):
            self._host.directory.suspect(peer, "it computes falsely")
            facts = (f"it has contradicted others in {DOUBTS} passes, lately {other}",)
            self._host.decisions.note(Topic.AUDIT, "leaves it out for a week", facts, about=(peer,))


def alike(one: Values, other: Values) -> bool:
    """Whether two peers can have computed these from one input: whole numbers may differ where floats that they were made of are
    all but equal, so they are not judged."""
    return all(_close(a, b) for a, b in zip(one, other, strict=True) if a.is_floating_point())


def _close(one: Tensor, other: Tensor) -> bool:
    """In the norm, over all samples."""
    if torch.isnan(one).any() or torch.isnan(other).any():
        return bool(torch.equal(torch.isnan(one), torch.isnan(other)))
    tolerance = TOLERANCE.get(one.dtype, COARSE_TOLERANCE)
    finite = one.double().nan_to_num(), other.double().nan_to_num()
    size = max(float(value.norm()) for value in finite)
    return float((finite[0] - finite[1]).norm()) <= tolerance * size
