"""A run in one process: the same batches, the same arithmetic, no swarm. The reference for any swarm's loss curve."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass

from swarmnode.compute.training.datasets.batches import Batches, Microbatch
from swarmnode.compute.training.learner import Learner
from swarmnode.compute.training.segment import Segment
from swarmnode.compute.training.snapshot import LocalState
from swarmnode.errors import UsageError
from swarmnode.swarm.records.run import Run, check_run


@dataclass(frozen=True)
class StepSummary:
    """Summary of a finished step: its mean loss, its duration, its size, and its gradient norm before clipping.

    `step_s` is 0 if it is not known. `tokens` is the number of tokens that were trained on, without padding; of samples if the
    model has no tokens. `peers` is the number of peers that computed the step. `expected_s` is its expected duration when it
    began; 0 if there was no estimate. `held_out_loss` is the mean loss of held-out data, by the parameters before the step's
    update, of the last step by the final ones; None if the step did not evaluate.
    `expert_load` is the load of the busiest expert over the mean load, a mean over microbatches; 0 if the run has no losses of
    routers.
    """

    step: int
    loss: float
    step_s: float
    tokens: int
    peers: int
    norm: float
    expected_s: float = 0.0
    held_out_loss: float | None = None
    expert_load: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second; 0 if the duration is not known."""
        return self.tokens / self.step_s if self.step_s else 0.0


def train_locally(
    segment: Segment,
    run: Run,
    batches: Batches,
    *,
    clock: Callable[[], float] = time.perf_counter,
    state: LocalState | None = None,
) -> Generator[StepSummary, None, None]:
    """Train the whole model and yield a summary of each step, as `local_learner` and `train_steps` do."""
    yield from train_steps(local_learner(segment, run, batches), batches, clock=clock, state=state)


def local_learner(segment: Segment, run: Run, batches: Batches) -> Learner:
    """Return the learner of a run in one process. Raises UsageError if run, data and model do not fit."""
    check_run(run)
    if run.data != batches.fingerprint:
        raise UsageError("the training's settings are for other data; use the data that they belong to")
    if (segment.start, segment.end) != (0, segment.units):
        raise UsageError(
            "a training in one process needs the whole model, not "
            f"layers [{segment.start}:{segment.end}): load all layers"
        )
    return Learner(segment, run)


def train_steps(
    learner: Learner,
    batches: Batches,
    *,
    clock: Callable[[], float] = time.perf_counter,
    state: LocalState | None = None,
) -> Generator[StepSummary, None, None]:
    """Train the remaining steps of a learner's run and yield a summary of each.

    With `state`, go on from it, and write it every `run.checkpoint_steps` steps and at the end, also if the iterator is closed.

    Raises UsageError if the state is of another run, NotFinite if a loss or gradient is not finite. Such a step is not committed:
    the parameters stay as the last good step left them.
    """
    if state is None:
        yield from _steps(learner, batches, clock)
        return
    state.load(learner)
    saved = learner.step
    try:
        for summary in _steps(learner, batches, clock):
            yield summary
            if learner.run.is_checkpoint(learner.step):
                state.save(learner)
                saved = learner.step
    finally:
        if learner.step != saved:
            state.save(learner)


def _steps(learner: Learner, batches: Batches, clock: Callable[[], float]) -> Generator[StepSummary, None, None]:
    """Train the remaining steps, and yield a summary of each."""
    run = learner.run
    for step in range(learner.step, run.steps):
        began_s = clock()
        found = _passes(learner, batches)
        losses, loads = zip(*found[: run.microbatches], strict=True)
        held_out = found[run.microbatches :]
        norm = math.sqrt(learner.squared_norm(learner.blocks))
        learner.commit({}, norm)
        if learner.step == run.steps:
            held_out = _passes(learner, batches)  # by the final weights
        yield StepSummary(
            step,
            math.fsum(losses) / len(losses),
            clock() - began_s,
            batches.tokens(step, run),
            peers=1,
            norm=norm,
            held_out_loss=math.fsum(loss for loss, _ in held_out) / len(held_out) if held_out else None,
            expert_load=math.fsum(loads) / len(loads),
        )


def _passes(learner: Learner, batches: Batches) -> list[tuple[float, float]]:
    """Return the loss and the load of the busiest expert of each microbatch of the learner's step."""
    run, step = learner.run, learner.step
    return [_pass(learner, batches.microbatch(step, number, run), number) for number in run.passes(step)]


def _pass(learner: Learner, microbatch: Microbatch, number: int) -> tuple[float, float]:
    """Return the loss of a microbatch and the load of its busiest expert."""
    (loss,) = learner.forward(number, number, 0, learner.segment.units, microbatch.inputs, microbatch.labels)
    learner.backward(number, ())
    return float(loss), learner.segment.expert_load
