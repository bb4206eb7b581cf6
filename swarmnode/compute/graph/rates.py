"""Rates: how fast a machine does each kind of work, and so how long a piece of work takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from swarmnode.compute.graph.work import ATTENTION, CALLS, CONVOLUTION, FUNCTION, MATMUL, PLAIN, Work


@dataclass(frozen=True)
class Rates:
    """Amounts per second, by kind of work."""

    per_s: Mapping[str, float]

    def seconds(self, work: Work) -> float:
        """How long the work takes."""
        return sum(amount / self.per_s[kind] for kind, amount in work.amounts.items())


REFERENCE = Rates({MATMUL: 1e11, CONVOLUTION: 1e11, ATTENTION: 5e10, PLAIN: 1e10, FUNCTION: 5e9, CALLS: 3e5})
"""A middling processor, for decisions that must not depend on the machine that makes them."""
