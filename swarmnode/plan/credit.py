"""Credit: the sum of a peer's receipts, discounted if few clients signed them.

A peer's friends may sign any receipt, so the number of clients matters. The sum is multiplied by 1 - H, and H is the
Herfindahl-Hirschman index of the clients' shares. With n clients of equal work 1 - 1/n of the sum counts; with one client nothing
counts. One more client, whatever it signs for, adds at most twice the signed work of all others together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from swarmnode.net.interfaces import PeerId
from swarmnode.swarm.records.receipt import Receipt

MOST_WEIGHT = 4.0
HALF_CREDIT = 10_000  # tokens through the whole model that earn half of the largest gain
TRAINED_WEIGHT = 3  # backward costs twice what forward does


@dataclass(frozen=True)
class Credit:
    """Work that clients signed for one worker, in layers times tokens (samples if the model has no tokens).

    `served` is inference and `trained` is training; `by_client` is their weighted sum for each client.
    """

    served: int
    trained: int
    by_client: Mapping[PeerId, int]

    def __repr__(self) -> str:
        return f"<Credit {self.counted:.0f} of {self.served} served, {self.trained} trained, {self.clients} clients>"

    @property
    def clients(self) -> int:
        """Number of clients that signed receipts."""
        return len(self.by_client)

    @property
    def signed(self) -> int:
        """Weighted sum of the work that all clients signed for."""
        return sum(self.by_client.values())

    @property
    def concentration(self) -> float:
        """Herfindahl-Hirschman index: the sum of the squares of the clients' shares; 1 with a single client or none."""
        total = self.signed
        return sum((work / total) ** 2 for work in self.by_client.values()) if total else 1.0

    @property
    def counted(self) -> float:
        """Signed work after the discount for concentration."""
        return self.signed * (1.0 - self.concentration)


def weight_of(credit: Credit, units: int) -> float:
    """Return the weight of an owner of machines with this `credit`: from 1 to below `MOST_WEIGHT`. The model has `units` layers."""
    tokens = credit.counted / units
    return 1.0 + (MOST_WEIGHT - 1.0) * tokens / (tokens + HALF_CREDIT)


def credit_of(receipts: Iterable[Receipt]) -> Credit:
    """Sum up the receipts of one worker; only the latest receipt of each batch counts."""
    latest: dict[tuple[PeerId, PeerId, int], Receipt] = {}
    for receipt in receipts:
        if receipt.replaces(latest.get(receipt.batch)):
            latest[receipt.batch] = receipt
    by_client: dict[PeerId, int] = {}
    for receipt in latest.values():
        work = receipt.served + TRAINED_WEIGHT * receipt.trained
        by_client[receipt.client] = by_client.get(receipt.client, 0) + work
    served, trained = (sum(getattr(one, kind) for one in latest.values()) for kind in ("served", "trained"))
    return Credit(served, trained, by_client)
