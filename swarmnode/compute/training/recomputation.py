"""Recomputation: a microbatch of the present step, as another replica computed it, without counting it.

It goes layer by layer, so that it needs only the memory of one layer's graph and gradients, and of the values at the boundaries
between layers.

Shape letters: N elements of a block's gradient, S of a gradient sketch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swarmnode.compute.training.device_learners import DeviceLearners
from swarmnode.compute.training.gradient_sketch import BlockSketches, gradient_sketch
from swarmnode.compute.training.saved_activations import Gradients, SavedPiece, check_finite, check_shapes, leaves
from swarmnode.compute.training.segment import Values


@dataclass(frozen=True)
class Recomputation:
    """Result of a recomputation: outputs, gradients of the inputs, and sketch_S of the growth of parameters' gradients."""

    outputs: Values
    gradients: Gradients
    sketch_S: Tensor


def recompute(
    learner: DeviceLearners,
    number: int,
    start: int,
    end: int,
    values: Values,
    labels: Values,
    gradients: Gradients,
    seed: bytes,
) -> Recomputation:
    """Compute layers [start, end) on microbatch `number` from `values`, then backwards from the gradients of their outputs.

    At the model's end it goes back from the loss on `labels` instead. Raises ProtocolError if the gradients do not fit, NotFinite.
    """
    boundaries = [values]
    for unit in range(start, end):
        boundaries.append(learner.compute(number, unit, unit + 1, boundaries[-1], labels))
    outputs = boundaries.pop()
    if end == learner.segment.units:
        gradients = (torch.full_like(outputs[0], 1 / learner.run.microbatches),)
    check_shapes(gradients, [output.shape for output in outputs], end)
    check_finite(gradients, end)
    grown = BlockSketches()
    for unit in reversed(range(start, end)):
        flowing, found = _back_through(learner, number, unit, boundaries.pop(), labels, gradients)
        for block, gradient_N in found:
            grown.add(block, gradient_sketch(gradient_N, seed))
        gradients = flowing
    return Recomputation(outputs, gradients, grown.joined())


def _back_through(
    learner: DeviceLearners, number: int, unit: int, values: Values, labels: Values, gradients: Gradients
) -> tuple[Gradients, Iterator[tuple[int, Tensor]]]:
    """Return the gradients of the values that entered a layer, and by block the gradient_N of its parameters."""
    inputs = leaves(values, unit)
    blocks = learner.parameters(unit, unit + 1)
    wanted = [value for value in inputs if value.requires_grad]
    wanted += [parameter for parameters in blocks.values() for parameter in parameters]
    found = iter(learner.gradients(number, SavedPiece(unit, unit + 1, inputs, None), gradients, wanted, labels))
    flowing = tuple(next(found) if value.requires_grad else None for value in inputs)
    return flowing, ((block, _flat(parameters, found)) for block, parameters in blocks.items())


def _flat(parameters: Sequence[Tensor], found: Iterator[Tensor | None]) -> Tensor:
    """Return the gradients of one block's `parameters` as one vector; zeros for a parameter without gradient."""
    gradients = (
        torch.zeros_like(parameter) if (gradient := next(found)) is None else gradient for parameter in parameters
    )
    return torch.cat([gradient.reshape(-1) for gradient in gradients])
