"""The census: who holds what, added up by span, so that a swarm of thousands is no larger than its distinct spans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from swarmnode.plan.flow import Floats, supply_of
from swarmnode.plan.view import PeerView, Span

UNMEASURED_UNITS_PER_S = 100.0


class Census:
    """Peers counted by span. `holders_U`: how many hold each unit; `supply_SE`: units/s by (start, end) of the span."""

    def __init__(self, units: int, peers: Iterable[PeerView] = ()) -> None:
        self.units = units
        self.spans: Counter[Span] = Counter()
        self.holders_U: npt.NDArray[np.intp] = np.zeros(units, np.intp)
        clipped = [(_clip(peer.span, units), peer.decode_units_per_s) for peer in peers]
        holding = [(span, speed or UNMEASURED_UNITS_PER_S) for span, speed in clipped if span.units > 0]
        self.supply_SE: Floats = supply_of(units, ((*span, speed) for span, speed in holding))
        self.spans.update(span for span, _ in holding)
        for span, count in self.spans.items():
            self.holders_U[span.start : span.end] += count

    def __repr__(self) -> str:
        return f"<Census {self.spans.total()} peers on {len(self.spans)} spans, {len(self.missing())} units missing>"

    def change(self, span: Span, units_per_s: float, peers: int) -> None:
        """Count so many `peers` of this speed more (or, below zero, fewer) on a span."""
        span = _clip(span, self.units)
        if span.units <= 0:
            return
        self.supply_SE[span.start, span.end] += peers * (units_per_s or UNMEASURED_UNITS_PER_S)
        self.holders_U[span.start : span.end] += peers
        self.spans[span] += peers
        if not self.spans[span]:
            del self.spans[span]
            self.supply_SE[span.start, span.end] = 0.0  # not what rounding has left

    def missing(self) -> list[int]:
        """The units without a holder."""
        return [int(unit) for unit in np.flatnonzero(self.holders_U == 0)]


def _clip(span: Span, units: int) -> Span:
    return (
        span if span.end <= units else Span(min(span.start, units), units)
    )  # thousands of peers: no new object for each
