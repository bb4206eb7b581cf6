"""Listener: who wants to know how a training goes."""

from __future__ import annotations

from typing import Protocol

from swarmnode.compute.training.local import StepSummary
from swarmnode.metrics import table
from swarmnode.metrics.metric import Histogram, Reading, Readings
from swarmnode.swarm.records.run import Run


class Listener(Protocol):
    """Called from the event loop's thread; must not block."""

    def begun(self, run: Run) -> None:
        """The data is read; these are all settings."""

    def step(self, report: StepSummary) -> None:
        """A step is over."""

    def waiting(self, why: str, missing: tuple[int, ...]) -> None:
        """The training stands still: `why` is a sentence that says who waits for what, `missing` are units that have nobody."""


class TrainerMeter:
    """Stands before another `Listener`."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._run: Run | None = None
        self._last: StepSummary | None = None
        self._waiting = False
        self._step_s = Histogram()
        self._tokens = 0

    def __repr__(self) -> str:
        return f"<TrainerMeter after {self._last}, {'waiting' if self._waiting else 'going on'}>"

    def begun(self, run: Run) -> None:
        """See `Listener`."""
        self._run = run
        self._listener.begun(run)

    def step(self, report: StepSummary) -> None:
        """See `Listener`."""
        assert self._run is not None
        self._last, self._waiting = report, False
        self._tokens += self._run.batch * max(1, self._run.sequence)
        if report.step_s:  # else its coordinator was lost before it could tell
            self._step_s.observe(report.step_s)
        self._listener.step(report)

    def waiting(self, why: str, missing: tuple[int, ...]) -> None:
        """See `Listener`."""
        self._waiting = True
        self._listener.waiting(why, missing)

    def readings(self) -> Readings:
        """All of it."""
        yield Reading(table.TRAINER_WAITING, self._waiting)
        yield Reading(table.TRAINER_TOKENS, self._tokens)
        yield Reading(table.TRAINER_STEP_SECONDS, self._step_s)
        if self._last is not None:
            yield Reading(table.TRAINER_STEP, self._last.step)
            yield Reading(table.TRAINER_LOSS, self._last.loss)
            yield Reading(table.TRAINER_PEERS, self._last.peers)
            yield Reading(table.TRAINER_EXPECTED_SECONDS, self._last.expected_s)
