"""Audits of passes: some are computed once more by another peer, and where the two differ a third says which of them is alone.

In the background, once the pass has gone on: a hop cannot know which of its passes is asked of others, nor they that it was.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable

import torch
from torch import Tensor

from swarmnode.audits.referee import Referee, odd_one_out
from swarmnode.codec.body import HopSpec
from swarmnode.ledger import Account
from swarmnode.net.interfaces import PeerId
from swarmnode.peer.host import Host

Values = tuple[Tensor, ...]
Ask = Callable[[HopSpec, Values, int], Awaitable[Values]]
"""What one peer makes of values, for a batch"""

MAX_BYTES = 64 << 20  # of the values of one: what is larger is not kept for it
TOLERANCE = {torch.float32: 0.03, torch.float64: 0.03}  # relative: TF32's products are good to 1e-3
COARSE_TOLERANCE = 0.15  # of bfloat16 and float16


class PassAuditor(Referee):
    """Audits of one client's passes: `share` of those at each hop are computed again, by `ask`."""

    def __init__(self, host: Host, ask: Ask, share: float) -> None:
        super().__init__(host, "audits of passes")
        self._ask = ask
        self._share = share

    def __repr__(self) -> str:
        return f"<PassAuditor of {self._share:.0%}, {len(self._tasks)} under way>"

    def take(self, hop: HopSpec, given: Values, computed: Values, batch: int) -> None:
        """Perhaps audit that a hop has made `computed` of `given`."""
        size_bytes = sum(value.nbytes for value in (*given, *computed))
        if self.dice.random() >= self._share or self.is_busy or size_bytes > MAX_BYTES:
            return
        second = self.another_route((hop,))
        if second is not None:
            held = self.host.link_config.ledger.count(Account.MESSAGES, size_bytes)
            case = self.settle(self._decide(hop, second[0], given, computed, batch))
            task = self._tasks.spawn(case, f"of peer {hop.peer}")
            task.add_done_callback(lambda _: held.release())

    async def _decide(self, hop: HopSpec, second: HopSpec, given: Values, computed: Values, batch: int) -> str:
        again = await self._ask(second, given, batch)
        if await asyncio.to_thread(alike, computed, again):
            for peer in (hop.peer, second.peer):
                self.standing.pass_audit(peer, batch)
            return "passed"
        third, alone = self.another_route((hop,), second.peer), None
        if third is not None:
            deciding = await self._ask(third[0], given, batch)
            alone = odd_one_out([await asyncio.to_thread(alike, other, deciding) for other in (computed, again)])
        if alone is None:
            self.doubt_both(hop.peer, second.peer)
        else:  # once may be chance, where a module decides between equals
            self.doubt((hop, second)[alone].peer, f"a pass, {secrets.token_hex(4)}")
        return "doubt"

    def doubt(self, peer: PeerId, other: str) -> bool:
        shunned = super().doubt(peer, other)
        if shunned:
            self.host.directory.suspect(peer, "it computes falsely")
        return shunned


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
