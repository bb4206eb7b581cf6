"""Bodies of `/swarmnode/credit/1`: who was served signs for what was done (`protocol/frames.md`).

RECEIPT    answered with END where it is kept; ERROR REFUSED where it claims more than was done
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from swarmnode.codec.body import SESSION_ID_BYTES, Body
from swarmnode.codec.frames import FrameKind

MAX_RECEIPT_BYTES = 512
MAX_WORK_IDS = 256

WorkId = Annotated[bytes, Meta(min_length=SESSION_ID_BYTES, max_length=SESSION_ID_BYTES)]


class SignedReceipt(Body, frozen=True):
    """A receipt (`protocol/records.md`), and what it covers beyond the one before: sessions by their ids, microbatches by the
    seals of their leases."""

    work: Annotated[tuple[WorkId, ...], Meta(min_length=1, max_length=MAX_WORK_IDS)]
    receipt: Annotated[bytes, Meta(min_length=1, max_length=MAX_RECEIPT_BYTES)]


CREDIT_BODIES: dict[FrameKind, type[Body]] = {FrameKind.RECEIPT: SignedReceipt}
