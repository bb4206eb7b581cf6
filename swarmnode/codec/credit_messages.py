"""Bodies of `/swarmnode/credit/1`: signed receipts of clients for work done for them (`protocol/frames.md`).

RECEIPT    answered with END if it is kept; ERROR REFUSED if it claims more than was done
CLAIM      on `/swarmnode/claim/1`: receipts of a node, for a client of the same owner; answered likewise
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from swarmnode.codec.body import SESSION_ID_BYTES, Body
from swarmnode.codec.frames import FrameKind

MAX_RECEIPT_BYTES = 512
MAX_WORK_IDS = 256
MAX_CLAIMED = 64

WorkId = Annotated[bytes, Meta(min_length=SESSION_ID_BYTES, max_length=SESSION_ID_BYTES)]
SignedBytes = Annotated[bytes, Meta(min_length=1, max_length=MAX_RECEIPT_BYTES)]


class SignedReceipt(Body, frozen=True):
    """A receipt (`protocol/records.md`), and the work that it covers beyond the one before: sessions and passes by their ids,
    microbatches by the seals of their leases."""

    work: Annotated[tuple[WorkId, ...], Meta(min_length=1, max_length=MAX_WORK_IDS)]
    receipt: SignedBytes


class CreditClaim(Body, frozen=True):
    """Voucher of a node that lends a client the credit of its receipts, with these receipts."""

    voucher: SignedBytes
    receipts: Annotated[tuple[SignedBytes, ...], Meta(min_length=1, max_length=MAX_CLAIMED)]


CREDIT_BODIES: dict[FrameKind, type[Body]] = {
    FrameKind.RECEIPT: SignedReceipt,
    FrameKind.CLAIM: CreditClaim,
}
