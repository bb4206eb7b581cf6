"""Credit: what a peer's receipts add up to.

Who serves nobody but friends can have any receipt from them, so what counts is how many clients there are: the sum is discounted
by its concentration, the Herfindahl-Hirschman index H of the clients' shares. Of n clients that were served alike 1 - 1/n of it
counts, of one alone nothing, and one more client, whatever it signs for, adds at most twice what all others together do.
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
    """Work of one worker, in units times tokens (samples if the model has no tokens). `by_client` is weighted work."""

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
        """All that clients signed for, weighted."""
        return sum(self.by_client.values())

    @property
    def concentration(self) -> float:
        """H: the sum of the squares of the clients' shares; 1 of a single client."""
        total = self.signed
        return sum((work / total) ** 2 for work in self.by_client.values()) if total else 1.0

    @property
    def counted(self) -> float:
        """Signed work after the discount for concentration."""
        return self.signed * (1.0 - self.concentration)


def weight_of(credit: Credit, units: int) -> float:
    """Return the weight of an owner with this `credit`, from 1 to below `MOST_WEIGHT`, for a model of `units` units."""
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
