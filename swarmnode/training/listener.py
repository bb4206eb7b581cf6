"""Listener: who wants to know how a training goes."""

from __future__ import annotations

from typing import Protocol

from swarmnode.compute.training.local import StepSummary
from swarmnode.swarm.records.run import Run


class Listener(Protocol):
    """Called from the event loop's thread; must not block."""

    def begun(self, run: Run) -> None:
        """The data is read; these are all settings."""

    def step(self, report: StepSummary) -> None:
        """A step is over."""

    def waiting(self, why: str, missing: tuple[int, ...]) -> None:
        """The training stands still: `why` is a sentence that says who waits for what, `missing` are units that have nobody."""
