"""The receipt: what one peer did for another, signed by who was served (`protocol/records.md`).

The client counts by itself and names the worker, so that nobody can make a receipt for own work, raise one, or pass it off as
another's. A batch of work has one receipt: the later one, which says more, replaces the one before.
"""

from __future__ import annotations

import msgspec

from swarmnode.codec.credit_messages import MAX_RECEIPT_BYTES
from swarmnode.net.interfaces import PeerId
from swarmnode.swarm.records.announcement import MAX_PEER_CHARS
from swarmnode.swarm.records.signed import PeerSigned, Sign, Verify

DOMAIN = b"swarmnode receipt 1\n"
MAX_UNIT_TOKENS = 1 << 53
MAX_BATCH_S = 86_400  # of work on one receipt
MAX_TIME_S = 1 << 40


class Receipt(msgspec.Struct, array_like=True, frozen=True):
    """Work from `since` to `until` (unix time, seconds), in units times tokens (samples, where a model has no tokens)."""

    swarm: bytes
    client: PeerId
    worker: PeerId
    since: int
    until: int
    served: int
    trained: int = 0

    def __repr__(self) -> str:
        return f"<Receipt of {self.client[-8:]} for {self.worker[-8:]}: {self.served} served, {self.trained} trained>"

    @property
    def batch(self) -> tuple[PeerId, PeerId, int]:
        """Of two receipts with the same one, one replaces the other."""
        return self.worker, self.client, self.since

    def replaces(self, other: Receipt | None) -> bool:
        """Whether it says more than another one of its batch."""
        return other is None or (self.served + self.trained, self.until) > (other.served + other.trained, other.until)


def _rules(receipt: Receipt) -> dict[str, bool]:
    """What each field must keep to, and whether it does."""
    work = receipt.served, receipt.trained
    return {
        "client": 0 < len(receipt.client) <= MAX_PEER_CHARS,
        "worker": 0 < len(receipt.worker) <= MAX_PEER_CHARS and receipt.worker != receipt.client,
        "times": 0 < receipt.since <= receipt.until <= min(receipt.since + MAX_BATCH_S, MAX_TIME_S),
        "work": all(0 <= done <= MAX_UNIT_TOKENS for done in work) and any(work),
    }


_KIND = PeerSigned("receipt", Receipt, domain=DOMAIN, rules=_rules, author=lambda receipt: receipt.client)


def sign_receipt(receipt: Receipt, sign: Sign) -> bytes:
    """The bytes for the worker to keep."""
    return msgspec.msgpack.encode(_KIND.sign(receipt, sign))


def open_receipt(raw: bytes, swarm: bytes | None, verify: Verify) -> Receipt:
    """The receipt in these bytes; `swarm` None takes one of any. Raises ProtocolError where its client did not sign it."""
    return _KIND.open(_KIND.read(raw, MAX_RECEIPT_BYTES), swarm, verify)
