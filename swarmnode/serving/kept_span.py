"""Kept span: a span in the host's memory while its node is paused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from swarmnode.ledger import Account, MemoryLedger, Reservation
from swarmnode.measuring.hardware import Hardware
from swarmnode.plan.view import Span
from swarmnode.serving.span_part import LoadedSpan


@dataclass(frozen=True)
class KeptSpan:
    """`replicas` of it, in parts. `memory` is what they take in the host's ledger, until `release`, or until they are on their
    devices again. `hardware` as they were computed with."""

    hardware: Hardware
    replicas: Sequence[Sequence[LoadedSpan]]
    memory: Reservation

    def __repr__(self) -> str:
        return f"<KeptSpan {self.replicas!r}>"

    @classmethod
    def of(cls, hardware: Hardware, replicas: Sequence[Sequence[LoadedSpan]], host: MemoryLedger) -> KeptSpan | None:
        """Move a span that nobody uses into the host's memory; None for quantised weights, which cannot go there and come back."""
        spans = [part.span for replica in replicas for part in replica]
        if any(span.quantization is not None for span in spans):
            for span in spans:
                span.close()
            return None
        for span in spans:
            span.move_to(torch.device("cpu"))
        return cls(hardware, replicas, host.count(Account.WEIGHTS, sum(span.weight_bytes for span in spans)))

    @property
    def units(self) -> Span:
        """Which they are."""
        return Span(self.replicas[0][0].span.start, self.replicas[0][-1].span.end)

    def release(self) -> None:
        """Free it."""
        for replica in self.replicas:
            for part in replica:
                part.span.close()
        self.memory.release()
