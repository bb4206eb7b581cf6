"""Unit time: how long a microbatch takes for one unit, as it is measured while the stage works."""

from __future__ import annotations

NEWEST = 0.1  # weight of the newest measurement


class UnitTime:
    """Seconds for one unit, forward and back: a moving average of what was timed."""

    def __init__(self) -> None:
        self._one_way_s = 0.0

    def __repr__(self) -> str:
        return f"<UnitTime {self.unit_s:.4f} s>"

    @property
    def unit_s(self) -> float:
        """0 before anything was timed."""
        return 2 * self._one_way_s

    def note(self, units: int, pass_s: float) -> None:
        """A pass through so many units, there or back, took so long: there are as many of each."""
        one_way_s = pass_s / units
        self._one_way_s = (1 - NEWEST) * self._one_way_s + NEWEST * one_way_s if self._one_way_s else one_way_s
