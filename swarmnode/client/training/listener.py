"""Listeners of a training's progress, and its metrics."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from swarmnode.compute.training.local import StepSummary
from swarmnode.data.samples import DataSummary
from swarmnode.metrics import table
from swarmnode.metrics.metric import Histogram, Reading, Readings
from swarmnode.swarm.records.run import Run


class Listener(Protocol):
    """Listener of a training's progress. Its methods are called in the event loop's thread and must not block."""

    def begun(self, run: Run, data: DataSummary) -> None:
        """Report that the data has been read.

        Args:
            run: All settings of the run.
            data: What the data holds, and how often the run passes it.
        """

    def step(self, report: StepSummary) -> None:
        """Report that a step is finished.

        Args:
            report: Loss, time and peers of the step.
        """

    def waiting(self, why: str, missing: tuple[int, ...]) -> None:
        """Report that the training waits.

        Args:
            why: A sentence that gives the reason.
            missing: The layers without a holder; may be empty.
        """


class EarlyStopping:
    """Listener that passes everything on to another listener, and calls `stop` after `patience` evaluations without a lower loss of
    held-out data (0: never). `stopped` says why, and is empty before."""

    def __init__(self, listener: Listener, patience: int) -> None:
        self.stopped = ""
        self.stop: Callable[[], None] = lambda: None
        self._listener = listener
        self._patience = patience
        self._best: tuple[float, int] = (math.inf, 0)  # loss, and its step
        self._worse = 0

    def begun(self, run: Run, data: DataSummary) -> None:
        """Pass the settings on."""
        self._listener.begun(run, data)

    def step(self, report: StepSummary) -> None:
        """Pass a step on, and stop if its held-out loss is one too many that is no lower."""
        self._listener.step(report)
        if report.held_out_loss is None:
            return
        self._best = min(self._best, (report.held_out_loss, report.step))
        self._worse = 0 if self._best[1] == report.step else self._worse + 1
        if self._patience and self._worse >= self._patience and not self.stopped:
            loss, step = self._best
            self.stopped = f"the held-out loss was lowest, {loss:.4f}, at step {step}"
            self.stop()

    def waiting(self, why: str, missing: tuple[int, ...]) -> None:
        """Pass the reason on."""
        self._listener.waiting(why, missing)


class TrainerMeter:
    """Listener that passes everything on to another listener and counts it for Prometheus."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._last: StepSummary | None = None
        self._waiting = False
        self._step_s = Histogram()
        self._tokens = 0

    def begun(self, run: Run, data: DataSummary) -> None:
        """Pass the settings on to the other listener."""
        self._listener.begun(run, data)

    def step(self, report: StepSummary) -> None:
        """Count a finished step, and pass the report on to the other listener."""
        self._last, self._waiting = report, False
        self._tokens += report.tokens
        if report.step_s:  # 0 if the coordinator was lost before it could report
            self._step_s.observe(report.step_s)
        self._listener.step(report)

    def waiting(self, why: str, missing: tuple[int, ...]) -> None:
        """Note that the training waits, and pass the reason on to the other listener."""
        self._waiting = True
        self._listener.waiting(why, missing)

    @property
    def last(self) -> StepSummary | None:
        """Summary of the last finished step; None before the first one."""
        return self._last

    def readings(self) -> Readings:
        """Yield the metrics of the trainer: waiting time, tokens and, after the first step, its results."""
        yield Reading(table.TRAINER_WAITING, self._waiting)
        yield Reading(table.TRAINER_TOKENS, self._tokens)
        yield Reading(table.TRAINER_STEP_SECONDS, self._step_s)
        if self._last is not None:
            yield Reading(table.TRAINER_STEP, self._last.step)
            yield Reading(table.TRAINER_LOSS, self._last.loss)
            yield Reading(table.TRAINER_EXPERT_LOAD, self._last.expert_load)
            yield Reading(table.TRAINER_PEERS, self._last.peers)
            yield Reading(table.TRAINER_EXPECTED_SECONDS, self._last.expected_s)
