"""Capacity index: holders and speeds summed by span, so that a swarm of thousands is no larger than its distinct spans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from swarmnode.plan.cost import sustained_units_per_s
from swarmnode.plan.spans.flow import Floats, supply_of
from swarmnode.plan.view import PeerView, Span


class CapacityIndex:
    """Peers counted by span. `holders_U`: how many hold each layer; `supply_SE`: layers/s by (start, end) of the span.

    A peer's speed is what its line sustains where a position weighs `position_bytes` between stages.
    """

    def __init__(self, units: int, peers: Iterable[PeerView] = (), position_bytes: int = 0) -> None:
        self.units = units
        self.position_bytes = position_bytes
        self.spans: Counter[Span] = Counter()
        self.holders_U: npt.NDArray[np.intp] = np.zeros(units, np.intp)
        holding = [(span, peer) for peer in peers if (span := self._clip(peer.span)).units > 0]
        self.supply_SE: Floats = supply_of(
            units, ((*span, self.units_per_s(peer, span.units)) for span, peer in holding)
        )
        self.spans.update(span for span, _ in holding)
        for span, count in self.spans.items():
            self.holders_U[span.start : span.end] += count

    def __repr__(self) -> str:
        return f"<CapacityIndex {self.spans.total()} peers on {len(self.spans)} spans, {len(self.missing())} units missing>"

    def units_per_s(self, peer: PeerView, span_units: int) -> float:
        """Return the layers/s that `peer` sustains on a span of `span_units` layers."""
        return sustained_units_per_s(
            peer.assumed_units_per_s, span_units, self.position_bytes, peer.up_bps, peer.down_bps
        )

    def change(self, peer: PeerView, by: int) -> None:
        """Count a peer as a holder of its layers and add its speed to its span's, or take both off if `by` is -1."""
        span = self._clip(peer.span)
        if span.units <= 0:
            return
        self.supply_SE[span.start, span.end] += by * self.units_per_s(peer, span.units)
        self.holders_U[span.start : span.end] += by
        self.spans[span] += by
        if not self.spans[span]:
            del self.spans[span]
            self.supply_SE[span.start, span.end] = 0.0  # not what rounding has left

    def reach(self) -> list[int]:
        """Return for each layer the furthest end of the spans that begin at or before it."""
        ends = [0] * self.units
        for start, end in self.spans:
            ends[start] = max(ends[start], end)
        return list(accumulate(ends, max))

    def edges(self) -> frozenset[int]:
        """Return the layers at which spans begin or end. The fewer, the more often one peer can stand in for another."""
        return frozenset(unit for span in self.spans for unit in span)

    def missing(self) -> list[int]:
        """Return the numbers of the layers without a holder."""
        return [int(unit) for unit in np.flatnonzero(self.holders_U == 0)]

    def _clip(self, span: Span) -> Span:
        if span.end <= self.units:
            return span
        return Span(min(span.start, self.units), min(span.end, self.units))
