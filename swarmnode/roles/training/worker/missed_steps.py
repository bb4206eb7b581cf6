"""Missed steps: what replicas agreed on while a listener fetches its state, until it can make up for it.

Each is as long as the gradients: they are in the ledger, and few. Where there is no room for one more the oldest go: a state that
was fetched after them is a beginning too, and one from before them is fetched anew.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from swarmnode.errors import LocalError
from swarmnode.ledger import Account, Full, MemoryLedger, Reservation
from swarmnode.roles.training.averaging.all_reduce import Agreed

MAX_MISSED = 16


@dataclass(frozen=True)
class MissedStep:
    """The update that ends `step`; `norm` is the gradient's, of the whole model."""

    step: int
    agreed: Agreed
    norm: float
    memory: Reservation


class MissedSteps:
    """Oldest first."""

    def __init__(self, ledger: MemoryLedger) -> None:
        self._ledger = ledger
        self._steps: deque[MissedStep] = deque()
        self._forgotten_until = 0  # steps before this one went by, and are not here

    def __repr__(self) -> str:
        return f"<MissedSteps {[missed.step for missed in self._steps]}>"

    def __len__(self) -> int:
        return len(self._steps)

    def clear(self) -> None:
        """Listen anew."""
        while self._steps:
            self._steps.popleft().memory.release()
        self._forgotten_until = 0

    def keep(self, step: int, agreed: Agreed, norm: float) -> None:
        """One more step went by."""
        while len(self._steps) >= MAX_MISSED:
            self._forget_oldest()
        while True:
            try:
                memory = self._ledger.reserve(Account.AVERAGING, agreed.size_bytes)
                break
            except Full:
                if not self._steps:
                    self._forgotten_until = step + 1
                    return
                self._forget_oldest()
        self._steps.append(MissedStep(step, agreed, norm, memory))

    def take(self, step: int) -> MissedStep | None:
        """The update that ends `step`, where it went by; its memory is the caller's to give back. Raises LocalError where it was
        forgotten."""
        while self._steps and self._steps[0].step < step:
            self._steps.popleft().memory.release()
        if step < self._forgotten_until or (self._steps and self._steps[0].step > step):
            raise LocalError(f"there was no room for what was agreed on at step {step}: a later state is to be fetched")
        return self._steps.popleft() if self._steps else None

    def _forget_oldest(self) -> None:
        oldest = self._steps.popleft()
        oldest.memory.release()
        self._forgotten_until = oldest.step + 1
