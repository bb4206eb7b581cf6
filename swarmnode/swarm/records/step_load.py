"""Load of a step: what a run asks of those who train, as they announce it, so that those who stand by know it, too."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import NamedTuple


class StepLoad(NamedTuple):
    """Of one run: the microbatches of a step, positions of one, and bytes of gradients that are averaged in a step for 1,000
    parameters. All 0 where there is no run."""

    microbatches: int = 0
    positions: int = 0
    averaged_millibytes: int = 0

    @property
    def all_positions(self) -> int:
        """That a step computes; 0 where there is no run."""
        return self.microbatches * self.positions


def middle_load(told: Iterable[StepLoad]) -> StepLoad:
    """Of those that are known, figure by figure, the middle one: nobody alone says what others compute by."""
    known = [load for load in told if load.all_positions]
    return StepLoad(*map(statistics.median_low, zip(*known, strict=True))) if known else StepLoad()
