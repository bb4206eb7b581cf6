"""Results of guesses that were taken back while they were computed."""

from __future__ import annotations

from collections import deque


class TakenBack:
    """Positions from which guesses were taken back, by turn: what an earlier turn computes from there on is dropped."""

    def __init__(self) -> None:
        self._cuts: deque[tuple[int, int]] = deque()  # (turn, position), both rising

    def __repr__(self) -> str:
        return f"<TakenBack from {[position for _, position in self._cuts]}>"

    def note(self, turn: int, position: int) -> None:
        """Note that inputs of turns before `turn` do not count from `position` on."""
        while self._cuts and self._cuts[-1][1] >= position:
            self._cuts.pop()
        self._cuts.append((turn, position))

    def limit(self, turn: int) -> int | None:
        """Return the position up to which a result of `turn` counts; None if all of it does. Results come in the order of their
        turns."""
        while self._cuts and self._cuts[0][0] <= turn:
            self._cuts.popleft()
        return self._cuts[0][1] if self._cuts else None
