"""Label queue: what trainers sent for the loss of microbatches that end here, until these have come the other way.

Labels of a microbatch go from its trainer straight to the last hop, which need not be the later one to hear of it: either side
waits for the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from swarmnode.codec.training_messages import Labels
from swarmnode.errors import ErrorCode, PeerLost, PeerRefused
from swarmnode.ledger import Account, Full, MemoryLedger, Reservation

MAX_LABELS = 64  # microbatches, those of the step to come included
LABELS_S = 10.0  # after the values are here, and half of the lease at most


class ReceivedLabels(NamedTuple):
    """LABELS as they came."""

    body: Labels
    payload: bytes | bytearray


@dataclass
class _Waiting:
    """Labels that nobody has asked for yet."""

    received: ReceivedLabels
    memory: Reservation


class LabelQueue:
    """By lease. Who sends labels may end the conversation that brought them: then they are forgotten."""

    def __init__(self, ledger: MemoryLedger) -> None:
        self._ledger = ledger
        self._waiting: dict[int, _Waiting] = {}
        self._awaited: dict[int, asyncio.Future[ReceivedLabels]] = {}

    def __repr__(self) -> str:
        return f"<LabelQueue of {len(self._waiting)} waiting, {len(self._awaited)} awaited>"

    def put(self, body: Labels, payload: bytes | bytearray) -> ErrorCode | None:
        """They have come; why they are not taken, or None."""
        received, awaited = ReceivedLabels(body, payload), self._awaited.pop(body.lease, None)
        if awaited is not None and not awaited.done():
            awaited.set_result(received)
            return None
        if body.lease in self._waiting or len(self._waiting) >= MAX_LABELS:
            return ErrorCode.BUSY
        try:
            memory = self._reserve(len(payload))
        except Full:
            return ErrorCode.BUSY
        self._waiting[body.lease] = _Waiting(received, memory)
        return None

    def _reserve(self, size_bytes: int) -> Reservation:
        """One microbatch is always let in, and so are its labels. Raises Full."""
        if self._waiting:
            return self._ledger.reserve(Account.MESSAGES, size_bytes)
        return self._ledger.count(Account.MESSAGES, size_bytes)

    async def take(self, lease: int, within_s: float) -> ReceivedLabels:
        """Those of a lease, which holds `within_s` (0: nobody knows how long). Raises PeerRefused where they do not come, PeerLost
        where the lease is over meanwhile."""
        waiting = self._waiting.pop(lease, None)
        if waiting is not None:
            waiting.memory.release()
            return waiting.received
        patience_s = min(LABELS_S, within_s / 2) if within_s else LABELS_S
        awaited = self._awaited[lease] = asyncio.get_running_loop().create_future()
        try:
            return await asyncio.wait_for(awaited, patience_s)
        except asyncio.TimeoutError:
            raise PeerRefused(
                f"its trainer sent no labels within {patience_s:.0f} s", code=ErrorCode.NOT_FOUND
            ) from None
        finally:
            self._awaited.pop(lease, None)

    def drop(self, leases: Collection[int]) -> None:
        """They are over: nobody waits for their labels."""
        for lease in leases:
            waiting, awaited = self._waiting.pop(lease, None), self._awaited.pop(lease, None)
            if waiting is not None:
                waiting.memory.release()
            if awaited is not None and not awaited.done():
                awaited.set_exception(PeerLost("the microbatch was given up"))

    def clear(self) -> None:
        """All leases are over."""
        self.drop([*self._waiting, *self._awaited])

    def next_step(self, step: int) -> None:
        """Those of steps before this one are over."""
        self.drop([lease for lease, one in self._waiting.items() if one.received.body.step < step])
