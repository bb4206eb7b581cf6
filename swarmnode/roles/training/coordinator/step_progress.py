"""Step progress: what one step's microbatches have come to, as stages and trainers tell it."""

from __future__ import annotations

import math
from collections.abc import Iterable

from swarmnode.codec.training_messages import Status
from swarmnode.plan.training.step_ledger import StepLedger
from swarmnode.roles.training.coordinator.leases import OutstandingLease
from swarmnode.roles.training.coordinator.worker_handle import WorkerHandle
from swarmnode.roles.training.worker.status import masks_of


class StepProgress:
    """Which microbatches are counted where (`ledger`), the loss of each, and when the step began."""

    def __init__(self, ledger: StepLedger, began_at_s: float) -> None:
        self.ledger = ledger
        self.began_at_s = began_at_s
        self._losses: dict[int, float] = {}

    def __repr__(self) -> str:
        return f"<StepProgress {self.ledger!r}, {len(self._losses)} losses>"

    @property
    def loss(self) -> float:
        """The mean over the microbatches."""
        return math.fsum(self._losses.values()) / max(1, len(self._losses))

    def enter(self, members: Iterable[WorkerHandle]) -> None:
        """These take part, and have counted nothing yet."""
        for member in members:
            self.ledger.report(member.peer, member.span, {})

    def count(self, lease: OutstandingLease, loss: float) -> None:
        """A trainer has a microbatch back: all stages of its route have counted it."""
        for peer, span in lease.route:
            self.ledger.count(peer, span, lease.number)
        self._losses[lease.number] = loss

    def take(self, member: WorkerHandle, status: Status) -> None:
        """What a stage says that it has counted, instead of what was known of it."""
        masks = self._masks(status)
        self.ledger.report(member.peer, member.span, masks)

    def add(self, member: WorkerHandle, status: Status) -> None:
        """The same, besides what is known already, which may be newer than what the stage said."""
        masks = self._masks(status)
        known = self.ledger.peers.get(member.peer)
        for unit, mask in known.masks.items() if known is not None else ():
            masks[unit] = masks.get(unit, 0) | mask
        self.ledger.report(member.peer, member.span, masks)

    def _masks(self, status: Status) -> dict[int, int]:
        """By unit. Whoever holds the last one also tells the losses of what it has counted there, in order."""
        masks = masks_of(status.counted, self.ledger.everything)
        self._losses.update(zip(_bits(masks.get(self.ledger.units - 1, 0)), status.losses, strict=False))
        return masks


def _bits(mask: int) -> list[int]:
    """Numbers of the bits that are set."""
    return [number for number in range(mask.bit_length()) if mask >> number & 1]
