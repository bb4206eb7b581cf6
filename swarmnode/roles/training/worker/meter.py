"""TrainingMeter: what a training stage counts, beside what every stage does."""

from __future__ import annotations

from swarmnode.metrics import table
from swarmnode.metrics.histogram import Histogram
from swarmnode.metrics.metric import Reading, Readings
from swarmnode.plan.view import Span
from swarmnode.roles.measuring.meters import TRAIN, StageMeter


class TrainingMeter(StageMeter):
    """A pass is of one microbatch; its tokens are samples times positions."""

    def __init__(self, span: Span) -> None:
        super().__init__(span, TRAIN)
        self.averaging = Histogram()  # seconds
        self.not_finite = 0

    def readings(self) -> Readings:
        """See `StageMeter`."""
        yield from super().readings()
        yield Reading(table.AVERAGING_SECONDS, self.averaging, (self.label,))
        yield Reading(table.NOT_FINITE, self.not_finite, (self.label,))
