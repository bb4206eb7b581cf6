"""Cost of a pass through a stage, learnt from earlier passes: a fixed time, and a time for each position.

The fixed part is reading the weights and starting the operators, the other multiplying. A straight line is fitted to
(positions, seconds) by least squares. Older passes count less and less: caches grow, and machines get other work.
"""

from __future__ import annotations

KEPT = 0.97  # of the weight of all earlier passes, at each new one


class PassCost:
    """Learnt seconds of a pass, `fixed_s + positions * position_s`; both are zero before the first `note`."""

    def __init__(self) -> None:
        self.position_s = 0.0  # of each further position: all of the time is theirs where all passes were alike
        self.fixed_s = 0.0  # of a pass, however short
        self._weight = self._x = self._y = self._xx = self._xy = 0.0  # sums over passes: x positions, y seconds

    def __repr__(self) -> str:
        return f"<PassCost {self.fixed_s * 1e3:.2f} ms and {self.position_s * 1e6:.1f} us for each position>"

    def note(self, positions: int, took_s: float) -> None:
        """Record that a pass over `positions` positions took `took_s` seconds."""
        x, y = float(positions), took_s
        self._weight = KEPT * self._weight + 1.0
        self._x = KEPT * self._x + x
        self._y = KEPT * self._y + y
        self._xx = KEPT * self._xx + x * x
        self._xy = KEPT * self._xy + x * y
        self.position_s = self._slope_s()
        self.fixed_s = (self._y - self.position_s * self._x) / self._weight

    def _slope_s(self) -> float:
        spread = self._weight * self._xx - self._x**2
        if spread <= 1e-6 * self._weight * self._xx:
            return self._y / self._x
        slope_s = (self._weight * self._xy - self._x * self._y) / spread
        return min(max(slope_s, 0.0), self._y / self._x)

    def seconds(self, positions: float) -> float:
        """Return the expected seconds of a pass over `positions` positions; 0 before the first note."""
        return self.fixed_s + positions * self.position_s

    def positions(self, within_s: float) -> float:
        """Return the positions that fit into `within_s` seconds: infinite if a position costs nothing, maybe negative."""
        return (within_s - self.fixed_s) / self.position_s if self.position_s else float("inf")
