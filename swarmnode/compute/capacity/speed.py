"""Speed at which this machine computes its layers, measured on the loaded layers in less than half a second."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from swarmnode.compute.model.span import ModelSpan
from swarmnode.compute.serving.runner import WANT_LAST, WANT_NOTHING, StageRunner, StepInput
from swarmnode.compute.stopwatch import Clock, best_s
from swarmnode.compute.training.lm import SpanSegment

PROBE_SESSION = -1
FEW_UNITS = 4
PREFILL_POSITIONS = 64
TRAINING_POSITIONS = 32


@dataclass(frozen=True)
class Speeds:
    """Speeds in positions through one layer per second: singly, inside a prompt, forward and backward, and in steps of two
    positions, as guesses make them. 0: not measured."""

    decode_units_per_s: float = 0.0
    prefill_units_per_s: float = 0.0
    training_units_per_s: float = 0.0
    pair_units_per_s: float = 0.0


def measure_serving(runner: StageRunner, *, few: bool = False, clock: Clock = time.perf_counter) -> Speeds:
    """Measure decode steps, steps of two positions and prompt chunks in a session of its own, closed at the end. No other session
    may run meanwhile.

    `few` measures only some layers in the middle and assumes that all take as long, for a result that will not hold for long.
    """
    start, end = runner.span.start, runner.span.end
    if few and end - start > FEW_UNITS:
        start = (start + end - FEW_UNITS) // 2
        end = start + FEW_UNITS
    units = end - start
    positions = min(PREFILL_POSITIONS, _context(runner.span))

    def run(x: Tensor, want: int) -> None:
        runner.run([StepInput(PROBE_SESSION, x, want=want)])
        runner.truncate(PROBE_SESSION, 0)  # room for the next pass: some models have few positions

    runner.open(PROBE_SESSION, rows=1, max_length=positions, start=start, end=end)
    try:
        step, pair, chunk = (_inputs(runner.span, start, count) for count in (1, 2, positions))
        step_s = best_s(lambda: run(step, WANT_LAST), runner.span.device, clock)
        pair_s = best_s(lambda: run(pair, WANT_LAST), runner.span.device, clock) if positions > 1 else 0.0
        chunk_s = best_s(lambda: run(chunk, WANT_NOTHING), runner.span.device, clock)
    finally:
        runner.close(PROBE_SESSION)
    pair_units_per_s = 2 * units / pair_s if pair_s else 0.0
    return Speeds(units / step_s, units * positions / chunk_s, pair_units_per_s=pair_units_per_s)


def measure_training(segment: SpanSegment, *, clock: Clock = time.perf_counter) -> Speeds:
    """Measure forward and backward passes of a short microbatch. No parameter, gradient or random state changes."""
    parameters = [parameter for block in segment.parameters().values() for parameter in block.values()]
    positions = min(TRAINING_POSITIONS, _context(segment.span))
    ids_BT = torch.zeros((1, positions), dtype=torch.int64, device=segment.device)
    hidden_BTH = torch.zeros((1, positions, segment.span.hidden_size), device=segment.device)
    values = (ids_BT,) if segment.start == 0 else (hidden_BTH.requires_grad_(),)

    def there_and_back() -> None:
        with torch.random.fork_rng(devices=_cards(segment.device)):
            output = segment.forward(values, segment.start, segment.end, 0, (ids_BT,))[0]
        torch.autograd.grad(output.float().sum(), parameters, allow_unused=True)

    pass_s = best_s(there_and_back, segment.device, clock)
    return Speeds(training_units_per_s=(segment.end - segment.start) * positions / pass_s)


def _cards(device: torch.device) -> list[torch.device]:
    """Return the device if it is a card with its own random generator, else none."""
    return [device] if device.type == "cuda" else []


def _context(span: ModelSpan) -> int:
    """Return the number of positions that the model was made for, or a default if its config names none."""
    return getattr(span.model.config, "max_position_embeddings", None) or PREFILL_POSITIONS


def _inputs(span: ModelSpan, unit: int, positions: int) -> Tensor:
    """Return a zero input of `unit`: ids for layer 0, else hidden states."""
    if unit == 0:
        return torch.zeros((1, positions), dtype=torch.int64)
    return torch.zeros((1, positions, span.hidden_size), dtype=span.dtype)
