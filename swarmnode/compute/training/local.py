"""A run in one process: the same batches, the same arithmetic, no swarm. The reference for any swarm's loss curve."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace

from swarmnode.compute.training.datasets.batches import Batches, Microbatch
from swarmnode.compute.training.learner import Learner
from swarmnode.compute.training.segment import Segment
from swarmnode.compute.training.snapshot import LocalState
from swarmnode.errors import UsageError
from swarmnode.swarm.records.run import Run, check_run


@dataclass(frozen=True)
class StepSummary:
    """Summary of a finished step: its mean loss, its gradient norm before clipping, and its speed.

    `peers` computed it. `expected_s` is its expected duration when it began; 0 if there was no estimate. `held_out_loss` is the
    mean loss of held-out data, by the parameters before the step's update; None if the step did not evaluate.
    """

    step: int
    loss: float
    step_s: float
    tokens_per_s: float
    peers: int
    norm: float
    expected_s: float = 0.0
    held_out_loss: float | None = None


def train_locally(
    segment: Segment,
    run: Run,
    batches: Batches,
    *,
    clock: Callable[[], float] = time.perf_counter,
    state: LocalState | None = None,
) -> Generator[StepSummary, None, None]:
    """Train the whole model and yield a summary of each step.

    With `state`, go on from it, and write it every `run.checkpoint_steps` steps and at the end, also if the iterator is closed.

    Raises UsageError if run, data and model do not fit, NotFinite if a loss or gradient is not finite. Such a step is not
    committed: the parameters stay as the last good step left them.
    """
    check_run(run)
    if run.data != batches.fingerprint:
        raise UsageError("the training's settings are for other data; use the data that they belong to")
    if (segment.start, segment.end) != (0, segment.units):
        raise UsageError(
            "a training in one process needs the whole model, not "
            f"layers [{segment.start}:{segment.end}): load all layers"
        )
    learner = Learner(segment, run)
    if state is None:
        yield from _steps(learner, batches, clock)
        return
    state.load(learner)
    try:
        for summary in _steps(learner, batches, clock):
            yield summary
            if learner.step % run.checkpoint_steps == 0 and learner.step < run.steps:
                state.save(learner)
    finally:
        state.save(learner)


def _steps(learner: Learner, batches: Batches, clock: Callable[[], float]) -> Generator[StepSummary, None, None]:
    """Train the steps that are left, and yield a summary of each."""
    run = learner.run
    for step in range(learner.step, run.steps):
        began_s = clock()
        found = [_pass(learner, batches.microbatch(step, number, run), number) for number in range(run.passes_at(step))]
        losses, held_out = found[: run.microbatches], found[run.microbatches :]
        norm = math.sqrt(learner.squared_norm(learner.blocks))
        learner.commit({}, norm)
        step_s = clock() - began_s
        tokens = run.batch * max(1, run.sequence)
        summary = StepSummary(step, math.fsum(losses) / len(losses), step_s, tokens / max(step_s, 1e-9), 1, norm)
        yield replace(summary, held_out_loss=math.fsum(held_out) / len(held_out)) if held_out else summary


def _pass(learner: Learner, microbatch: Microbatch, number: int) -> float:
    (loss,) = learner.forward(number, number, 0, learner.segment.units, microbatch.inputs, microbatch.labels)
    learner.backward(number, ())
    return float(loss)
