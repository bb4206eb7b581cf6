"""Audits of passes: another peer recomputes some of them; if its results differ, a third peer decides which of the two is wrong.

Audits run in the background after the pass has gone on. A hop cannot know which of its passes are recomputed elsewhere, and the
recomputing peer cannot know that it takes part in an audit.
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
"""Function that has one peer compute a hop: `(hop, input values, batch) -> output values`"""

MAX_BYTES = 64 << 20  # input and output values of one pass; larger passes are not audited
TOLERANCE = {torch.float32: 0.03, torch.float64: 0.03}  # relative: TF32's products are good to 1e-3
COARSE_TOLERANCE = 0.15  # for bfloat16 and float16


class PassAuditor(Referee):
    """Auditor of one client's passes: has a `share` of the passes at each hop recomputed by another peer, through `ask`."""

    def __init__(self, host: Host, ask: Ask, share: float) -> None:
        super().__init__(host, "audits of passes")
        self._ask = ask
        self._share = share

    def __repr__(self) -> str:
        return f"<PassAuditor of {self._share:.0%}, {len(self._tasks)} under way>"

    def take(self, hop: HopSpec, given: Values, computed: Values, batch: int) -> None:
        """Audit with probability `share`, in the background, whether `hop` computed `computed` correctly from `given`.

        No audit starts if too many are under way, the values exceed `MAX_BYTES`, or no other peer can take the hop.
        """
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
        else:  # a single doubt may be chance, if a module decides between equal values
            self.doubt((hop, second)[alone].peer, f"a pass, {secrets.token_hex(4)}")
        return "doubt"

    def doubt(self, peer: PeerId, other: str) -> bool:
        shunned = super().doubt(peer, other)
        if shunned:
            self.host.directory.suspect(peer, "it computes falsely")
        return shunned


def alike(one: Values, other: Values) -> bool:
    """Return whether two peers can have computed these values from the same input.

    Only floats are compared: integers derived from almost equal floats may differ.
    """
    return all(_close(a, b) for a, b in zip(one, other, strict=True) if a.is_floating_point())


def _close(one: Tensor, other: Tensor) -> bool:
    """Compare the norms over all samples: true if the difference is within the tolerance and any NaN are in the same places."""
    if torch.isnan(one).any() or torch.isnan(other).any():
        return bool(torch.equal(torch.isnan(one), torch.isnan(other)))
    tolerance = TOLERANCE.get(one.dtype, COARSE_TOLERANCE)
    finite = one.double().nan_to_num(), other.double().nan_to_num()
    size = max(float(value.norm()) for value in finite)
    return float((finite[0] - finite[1]).norm()) <= tolerance * size
