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

    def waiting(self, missing: tuple[int, ...]) -> None:
        """The training stands still: these units have nobody; where none is named, no peer is ready at all."""
