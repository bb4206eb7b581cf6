"""Network coordinates: points in a small space whose distances are round trips, to estimate links that were never measured.

Vivaldi, Dabek, Cox, Kaashoek and Morris, SIGCOMM 2004: every peer is a mass, every measured round trip a spring between two of
them, and each measurement moves the measuring peer a little along its spring (section 3, figure 3). Three dimensions and a height,
which stands for the access link that every path of the peer passes (section 5.4). The length of the move depends on the certainty
of both (section 3.3). All times in milliseconds.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

STEP_MS = 0.1  # unit of the integers of an announced coordinate
MAX_STEPS = 1 << 20
SMALLEST_HEIGHT_MS = 0.1
ERROR_WEIGHT = 0.25  # c_e: share of a measurement's relative error in the own error
MOVE_WEIGHT = 0.25  # c_c: largest share of the way that one measurement moves the coordinate
MAX_ERROR = 1.0


@dataclass(frozen=True, slots=True)
class Coordinate:
    """Network coordinate: a point (x, y, z) and a height above it, both in milliseconds, and the relative error of its
    estimates."""

    place: tuple[float, float, float] = (0.0, 0.0, 0.0)
    height_ms: float = SMALLEST_HEIGHT_MS
    error: float = MAX_ERROR

    def __repr__(self) -> str:
        x, y, z = self.place
        return f"<Coordinate ({x:.1f}, {y:.1f}, {z:.1f}) + {self.height_ms:.1f} ms, error {self.error:.0%}>"

    def rtt_ms(self, other: Coordinate) -> float:
        """Return the estimated round trip to a peer at another coordinate, in milliseconds."""
        return math.dist(self.place, other.place) + self.height_ms + other.height_ms

    def moved(self, other: Coordinate, rtt_ms: float, direction: Sequence[float]) -> Coordinate:
        """Return the coordinate after a measured round trip to `other`. `direction` is used if both are at the same point."""
        sureness = self.error / (self.error + other.error)
        estimate_ms = self.rtt_ms(other)
        relative_error = min(abs(estimate_ms - rtt_ms) / rtt_ms, 10.0)
        weight = ERROR_WEIGHT * sureness
        error = min(MAX_ERROR, relative_error * weight + self.error * (1 - weight))
        pull_ms = MOVE_WEIGHT * sureness * (rtt_ms - estimate_ms)
        return self._pushed(other, pull_ms, direction, max(error, 0.01))

    def _pushed(self, other: Coordinate, push_ms: float, direction: Sequence[float], error: float) -> Coordinate:
        """Return the coordinate moved by `push_ms` away from `other`: along the line between the points and, in proportion,
        upwards."""
        away = [mine - theirs for mine, theirs in zip(self.place, other.place, strict=True)]
        distance_ms = math.hypot(*away)
        if distance_ms < 1e-6:
            away, distance_ms = list(direction), math.hypot(*direction)
        heights_ms = self.height_ms + other.height_ms
        length_ms = distance_ms + heights_ms
        x, y, z = (mine + push_ms * part / length_ms for mine, part in zip(self.place, away, strict=True))
        height_ms = max(SMALLEST_HEIGHT_MS, self.height_ms + push_ms * heights_ms / length_ms)
        return Coordinate((x, y, z), height_ms, error)

    def packed(self) -> tuple[int, ...]:
        """Return the announced form: x, y, z and height in steps of 0.1 ms, and the error in percent."""
        steps = (round(number / STEP_MS) for number in (*self.place, self.height_ms))
        return (*(max(-MAX_STEPS, min(MAX_STEPS, step)) for step in steps), math.ceil(self.error * 100))

    @classmethod
    def unpacked(cls, numbers: Sequence[int]) -> Coordinate | None:
        """Return the coordinate that a peer announced; None if it has none yet, or its error says that it knows nothing."""
        if len(numbers) != 5 or numbers[4] >= MAX_ERROR * 100:
            return None
        x, y, z, height_ms = (number * STEP_MS for number in numbers[:4])
        return cls((x, y, z), max(height_ms, SMALLEST_HEIGHT_MS), max(numbers[4] / 100, 0.01))


class Surveyor:
    """Keeper of this peer's own coordinate, updated from the round trips that links measure."""

    def __init__(self, seed: object) -> None:
        self.coordinate = Coordinate()
        self._random = random.Random(repr(seed))

    def measured(self, theirs: Coordinate | None, rtt_s: float) -> None:
        """Update the coordinate by a round trip to a peer at `theirs`; None if that peer announces none, so that it counts as
        knowing nothing."""
        if rtt_s > 0:
            direction = [self._random.gauss(0, 1) for _ in range(3)]
            self.coordinate = self.coordinate.moved(theirs or Coordinate(), rtt_s * 1e3, direction)
