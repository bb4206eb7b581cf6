"""Step time: how long a step of the run takes, as a worker sees them go by."""

from __future__ import annotations

import math


class StepTime:
    """Mean seconds of a step, since the first look at which one was done."""

    def __init__(self) -> None:
        self._first = self._last = (0, 0.0)  # step, and when

    def __repr__(self) -> str:
        return f"<StepTime {self.step_s:.3f} s, at step {self._last[0]}>"

    @property
    def step_s(self) -> float:
        """Infinite before two were seen."""
        (first, since_s), (last, until_s) = self._first, self._last
        return (until_s - since_s) / (last - first) if last > first else math.inf

    def note(self, step: int, now_s: float) -> None:
        """The run is at this step now; one before the last means that it was led back, or is another run."""
        if not self._first[0] or step < self._last[0]:
            self._first = step, now_s
        if step != self._last[0]:
            self._last = step, now_s

    def rest_s(self, steps: int) -> float:
        """Until so many are done."""
        return max(0, steps - self._last[0]) * self.step_s if steps > self._last[0] else 0.0
