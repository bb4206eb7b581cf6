"""The voucher: a node lends its credit to a client of the same owner, signed by the node (`protocol/records.md`)."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from swarmnode.codec.credit_messages import MAX_RECEIPT_BYTES
from swarmnode.codec.training_fields import Peer
from swarmnode.errors import ErrorCode, ProtocolError
from swarmnode.swarm.records.signed import PeerSigned, Signable, Verify

DOMAIN = b"swarmnode voucher 1\n"
MAX_VOUCHER_S = 86_400


class Voucher(Signable, frozen=True):
    """What `worker` is credited counts for `client` `until` then (unix time, seconds)."""

    swarm: bytes
    worker: Peer
    client: Peer
    until: Annotated[int, Meta(gt=0)]

    def __repr__(self) -> str:
        return f"<Voucher of {self.worker[-8:]} for {self.client[-8:]}>"


_KIND = PeerSigned("voucher", Voucher, domain=DOMAIN, max_bytes=MAX_RECEIPT_BYTES, author="worker")
sign_voucher = _KIND.sign


def open_voucher(raw: bytes, swarm: bytes, verify: Verify, now: float) -> Voucher:
    """The voucher in these bytes, where it holds at `now`. Raises ProtocolError."""
    voucher = _KIND.open(raw, swarm, verify)
    if not 0 <= voucher.until - now <= MAX_VOUCHER_S:
        raise ProtocolError("a voucher of another time", code=ErrorCode.REFUSED, peer=voucher.client)
    return voucher
