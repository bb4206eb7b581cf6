"""Unit time: how long a microbatch takes for one unit, as it is estimated when a run begins, and measured while the stage works."""

from __future__ import annotations

NEWEST = 0.1  # weight of the newest measurement, once there are enough


class UnitTime:
    """Seconds for one unit, forward and back. Until a pass was timed they are the estimate, as far off as the last run's was; then
    the mean of what was timed, of which the newest counts most."""

    def __init__(self) -> None:
        self._estimated_s = 0.0
        self._corrected = 1.0  # the estimate in force
        self._one_way_s = 0.0
        self._passes = 0

    def __repr__(self) -> str:
        return f"<UnitTime {self.unit_s:.4f} s, {self.expected_s:.4f} s expected>"

    @property
    def unit_s(self) -> float:
        """0 before anything was timed or estimated."""
        return self.timed_s or self.expected_s

    @property
    def timed_s(self) -> float:
        """0 before anything was timed: of a pass there, and one back."""
        return 2 * self._one_way_s if self._passes > 1 else 0.0

    @property
    def expected_s(self) -> float:
        """When the run began; 0 where nothing could be estimated."""
        return self._estimated_s * self._corrected

    @property
    def correction(self) -> float:
        """How many times as long as estimated it takes, as far as that is known."""
        return self.timed_s / self._estimated_s if self.timed_s and self._estimated_s else self._corrected

    def begin(self, estimated_s: float) -> None:
        """A run begins, whose microbatches are estimated to take a unit so long: what was timed is of other ones."""
        self._corrected = self.correction
        self._estimated_s, self._one_way_s, self._passes = estimated_s, 0.0, 0

    def note(self, units: int, pass_s: float) -> None:
        """A pass through so many units, there or back, took so long: there are as many of each."""
        self._passes += 1
        self._one_way_s += (pass_s / units - self._one_way_s) * max(NEWEST, 1 / self._passes)
