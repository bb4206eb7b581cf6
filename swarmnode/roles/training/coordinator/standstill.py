"""Standstill: for how long a stage has counted and committed nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping


class Standstill:
    """`note` is told now and then where the stage is; `clock` in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._where: tuple[int, Mapping[int, int]] | None = None
        self._since_s = clock()

    def __repr__(self) -> str:
        return f"<Standstill for {self.still_s:.0f} s>"

    def note(self, step: int, counted: Mapping[int, int]) -> None:
        """It is at this step, and has counted these microbatches, by unit."""
        if self._where != (step, counted):
            self._where, self._since_s = (step, counted), self._clock()

    @property
    def still_s(self) -> float:
        """Since anything changed."""
        return self._clock() - self._since_s
