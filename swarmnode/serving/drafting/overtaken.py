"""Results of guesses that were taken back while they were computed."""

from __future__ import annotations

from collections import deque


class TakenBack:
    """Cuts of a session's guesses, each a turn and a position: results of earlier turns do not count behind the position."""

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
        """Return the end of the positions that count in a result of `turn`; None if all count. Results come in the order of
        their turns."""
        while self._cuts and self._cuts[0][0] <= turn:
            self._cuts.popleft()
        return self._cuts[0][1] if self._cuts else None
