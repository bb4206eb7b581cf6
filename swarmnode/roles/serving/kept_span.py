"""A span in the host's memory while its node is paused."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from swarmnode.compute.model.span import ModelSpan
from swarmnode.ledger import Account, MemoryLedger, Reservation
from swarmnode.plan.view import Span


@dataclass(frozen=True)
class KeptSpan:
    """`memory` is what it takes in the host's ledger, until `release`, or `into` another one."""

    span: ModelSpan
    memory: Reservation

    def __repr__(self) -> str:
        return f"<KeptSpan {self.span!r}>"

    @classmethod
    def of(cls, span: ModelSpan, host: MemoryLedger) -> KeptSpan | None:
        """Move a span that nobody uses into the host's memory; None for quantised weights, which cannot go there and come back."""
        if span.quantization is not None:
            span.close()
            return None
        span.move_to(torch.device("cpu"))
        return cls(span, host.count(Account.WEIGHTS, span.weight_bytes))

    @property
    def units(self) -> Span:
        """Which they are."""
        return Span(self.span.start, self.span.end)

    def into(self, ledger: MemoryLedger) -> Reservation:
        """Its memory belongs to this ledger from now on: a device's."""
        weights = ledger.count(Account.WEIGHTS, self.span.weight_bytes)
        self.memory.release()
        return weights

    def release(self) -> None:
        """Free it."""
        self.span.close()
        self.memory.release()
