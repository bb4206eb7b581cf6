"""A forward pass that waits for its gradients, in pieces with one graph each, and the way of gradients back through a piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from swarmnode.codec.tensors import LARGEST_VALUE
from swarmnode.compute.training.block import Changes
from swarmnode.compute.training.segment import Shares, Values
from swarmnode.errors import NotFinite, ProtocolError

Gradients = tuple[Tensor | None, ...]

LARGEST_SENT = LARGEST_VALUE / 2
"""Largest magnitude of a value before it is encoded for a neighbour: no codec doubles a value."""
LARGEST_SUM = 2.0**56
"""Largest magnitude in a sum of gradients that a replica sends; see `codec.tensors.LARGEST_VALUE`."""


@dataclass
class SavedPiece:
    """Layers [start, end) of one pass. `outputs` have their graph; if None, they are recomputed when gradients come."""

    start: int
    end: int
    inputs: Values
    outputs: Values | None


@dataclass
class SavedActivations:
    """Pass of microbatch `index` through neighbouring pieces of layers [start, end). `shapes` are its outputs', `entered` the
    number of values that came in. One that `evaluates` is of held-out data: it has no pieces and no gradients."""

    index: int
    start: int
    end: int
    labels: Values  # used at the model's end
    seed: int
    autocast_dtype: torch.dtype | None  # None: float32
    pieces: list[SavedPiece] = field(default_factory=list)
    shapes: tuple[torch.Size, ...] = ()
    changes: dict[int, Changes] = field(default_factory=dict)  # by unit
    shares: Shares = ()  # of its means over labels in those over the step's
    evaluates: bool = False
    entered: int = 0

    @property
    def in_float16(self) -> bool:
        """Whether the pass computes in float16, so that gradients need a scale."""
        return self.autocast_dtype is torch.float16


def leaves(values: Values, boundary: int) -> Values:
    """Return the values as the start of a new graph. Behind the first boundary every float takes a gradient."""
    return tuple(value.detach().requires_grad_(boundary > 0 and value.is_floating_point()) for value in values)


def accumulate(outputs: Values, grads: Sequence[Tensor | None], inputs: Values) -> Gradients:
    """Return the gradients of the inputs, None for those without one. The parameters' gradients are added to their `grad`."""
    roots, seeds = pairs(outputs, grads)
    if roots:
        torch.autograd.backward(roots, seeds)
    return tuple(value.grad for value in inputs)


def check_shapes(gradients: Sequence[Tensor | None], shapes: Sequence[torch.Size], boundary: int) -> None:
    """Raise ProtocolError if `gradients` do not fit values of these `shapes` at a boundary."""
    if len(gradients) != len(shapes):
        raise ProtocolError(f"there are {len(gradients)} gradients for {len(shapes)} values at boundary {boundary}")
    for gradient, shape in zip(gradients, shapes, strict=True):
        if gradient is not None and gradient.shape != shape:
            raise ProtocolError(f"a gradient has the shape {tuple(gradient.shape)}, but its value has {tuple(shape)}")


def check_finite(gradients: Sequence[Tensor | None], boundary: int) -> None:
    """Raise NotFinite if a gradient that came back to a boundary is NaN or infinite."""
    if not is_finite(gradients):
        raise NotFinite(
            f"the gradient that came back from layer {boundary} "
            "is NaN or infinite; lower --lr or --clip, or check the data",
            unit=boundary,
        )


def is_finite(values: Sequence[Tensor | None]) -> bool:
    """Return whether no float among the values, all on one device, is NaN or infinite."""
    return is_within(values, torch.finfo(torch.float32).max)


def is_within(values: Sequence[Tensor | None], largest: float) -> bool:
    """Return whether no float among the values, all on one device, is NaN or has a magnitude above `largest`.

    One pass over memory, no copies, one wait for the device. A sum would not do: finite values may overflow in it.
    """
    floats = [value.detach() for value in values if value is not None and value.is_floating_point() and value.numel()]
    ends = [end.float() for value in floats for end in torch.aminmax(value)]
    return not ends or bool((torch.stack(ends).abs() <= largest).all())


def has_nan(values: Values) -> bool:
    """Return whether a float among the values is NaN. Infinities may be intended in inputs, such as masks."""
    return any(value.is_floating_point() and bool(value.isnan().any()) for value in values)


def pairs(outputs: Values, grads: Sequence[Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the outputs that depend on trained weights and have a gradient, and these gradients."""
    pairs = [
        (output, gradient.to(output))
        for output, gradient in zip(outputs, grads, strict=True)
        if gradient is not None and output.requires_grad
    ]
    return [output for output, _ in pairs], [gradient for _, gradient in pairs]
