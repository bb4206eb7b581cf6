"""Receipts, which a client signs for the work of a worker, and vouchers, which a worker signs to pass its credit to a
client.

Format: `protocol/records.md`. The client counts by itself and names the worker. So no peer can make a receipt for its
own work, raise one, or claim another worker's. A batch of work has one receipt: a later receipt with more work replaces
the earlier one.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from swarmnode.codec.messages import MAX_RECEIPT_BYTES
from swarmnode.codec.training_messages import Peer
from swarmnode.errors import ErrorCode, ProtocolError
from swarmnode.net.interfaces import PeerId
from swarmnode.swarm.records.signed import PeerSigned, Signable, Verify

DOMAIN = b"swarmnode receipt 1\n"
VOUCHER_DOMAIN = b"swarmnode voucher 1\n"
MAX_UNIT_TOKENS = 1 << 53
MAX_BATCH_S = 86_400  # longest span of work on one receipt
MAX_VOUCHER_S = 86_400
MAX_TIME_S = 1 << 40

UnitTokens = Annotated[int, Meta(ge=0, le=MAX_UNIT_TOKENS)]


class Voucher(Signable, frozen=True):
    """Statement that the credit of `worker` counts for `client` until `until` (unix time, seconds)."""

    swarm: bytes
    worker: Peer
    client: Peer
    until: Annotated[int, Meta(gt=0)]

    def __repr__(self) -> str:
        return f"<Voucher of {self.worker[-8:]} for {self.client[-8:]}>"


_VOUCHER_KIND = PeerSigned("voucher", Voucher, domain=VOUCHER_DOMAIN, max_bytes=MAX_RECEIPT_BYTES, author="worker")
sign_voucher = _VOUCHER_KIND.sign


def open_voucher(raw: bytes, swarm: bytes, verify: Verify, now: float) -> Voucher:
    """Open a voucher. Raises ProtocolError if its worker did not sign it, or `until` is past or more than a day after
    `now`."""
    voucher = _VOUCHER_KIND.open(raw, swarm, verify)
    if not 0 <= voucher.until - now <= MAX_VOUCHER_S:
        raise ProtocolError(
            "its voucher has expired, or is valid for too long", code=ErrorCode.REFUSED, peer=voucher.client
        )
    return voucher


class Receipt(Signable, frozen=True):
    """Work from `since` to `until` (unix time, seconds), in layers times tokens (samples, if a model has no tokens)."""

    swarm: bytes
    client: Peer
    worker: Peer
    since: int
    until: int
    served: UnitTokens
    trained: UnitTokens = 0

    def __repr__(self) -> str:
        return f"<Receipt of {self.client[-8:]} for {self.worker[-8:]}: {self.served} served, {self.trained} trained>"

    @property
    def batch(self) -> tuple[PeerId, PeerId, int]:
        """Key of the batch: of two receipts with the same key, one replaces the other."""
        return self.worker, self.client, self.since

    def replaces(self, other: Receipt | None) -> bool:
        """Return whether this receipt counts more work than another one of its batch, or as much until a later time.
        True if `other` is None."""
        return other is None or (self.served + self.trained, self.until) > (other.served + other.trained, other.until)

    def rules(self) -> dict[str, bool]:
        return {
            "worker": self.worker != self.client,
            "times": 0 < self.since <= self.until <= min(self.since + MAX_BATCH_S, MAX_TIME_S),
            "work": self.served > 0 or self.trained > 0,
        }


_KIND = PeerSigned("receipt", Receipt, domain=DOMAIN, max_bytes=MAX_RECEIPT_BYTES, author="client")
sign_receipt, open_receipt = _KIND.sign, _KIND.open
