"""Segment: what training needs to know of some units of any model, be it a transformers span or a piece of a graph."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from swarmnode.errors import CheckpointError

Shares = tuple[float, ...]
"""By which the means over labels of a microbatch's loss count, one for each; none: they are as they are."""
Values = tuple[Tensor, ...]
"""What crosses the boundary before a unit: floats (some of which take gradients), and whole numbers that only pass by. These may
stay on the host, where they are looked at before anything is computed: what a unit needs of them it takes to its device."""


def moved(values: Values, device: torch.device) -> Values:
    """The same for units on this device."""
    return tuple(value.to(device) if value.is_floating_point() else value for value in values)


class Segment(ABC):
    """Units [start, end) of a model of `units` units, ready to be trained. Not safe for use from two threads at once.

    Parameters belong to blocks: block u is unit u's own; SHARED holds what the first and last unit have in common, and
    is held by whoever holds either of the two.
    """

    start: int
    end: int
    units: int
    device: torch.device
    means: int = 0
    """How many means over labels the loss adds up."""
    is_portable: bool = True
    """Whether another device computes the same, but for how it rounds: whatever is drawn is not drawn by the device."""

    @property
    def positions(self) -> int | None:
        """Of tokens in a sample; None where the model knows no end, or no tokens."""
        return None

    @abstractmethod
    def parameters(self) -> Mapping[int, Mapping[str, nn.Parameter]]:
        """By block, then by name as in the model's state dict; no parameter twice."""

    @abstractmethod
    def buffers(self) -> Mapping[int, Mapping[str, Tensor]]:
        """Persistent buffers (running statistics of batch norms), by unit, then by name."""

    @abstractmethod
    def forward(
        self, values: Values, start: int, end: int, seed: int, labels: Values = (), shares: Shares = ()
    ) -> Values:
        """Units [start, end) in training mode on the values at boundary `start`; the values at boundary `end`.

        At the end of the model that is the mean loss of the microbatch, a scalar; only there are `labels` looked at: those of the
        model's inputs that its last unit takes, which cross no boundary for its sake. `shares` are those of its means over labels.

        Whatever is random follows from (seed, unit) alone, so that another split, a recomputation or a replay draws the same.
        """

    def dummies(self, boundary: int, batch: int, sequence: int) -> tuple[Values, Values]:
        """Values at a boundary, and labels, as a microbatch of so many samples might have them: of the right shape, and as slow to
        compute with as any. Raises CheckpointError where nobody but the data knows them."""
        raise CheckpointError("what comes into these units is known to their data alone")


def refound(segment: Segment, founding: Segment) -> None:
    """Give a segment the parameters and buffers of another one that has some of its units."""
    with torch.no_grad():
        for held, theirs in ((segment.parameters(), founding.parameters()), (segment.buffers(), founding.buffers())):
            for block, tensors in theirs.items():
                for name, tensor in tensors.items():
                    held[block][name].copy_(tensor)


class SplitSegment(Segment):
    """Neighbouring segments, each on a device of its own, as one. What the ends share is the first one's."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segments = tuple(segments)
        first, last = segments[0], segments[-1]
        self.start, self.end, self.units, self.device = first.start, last.end, first.units, first.device
        self.is_portable, self.means = first.is_portable, last.means

    def __repr__(self) -> str:
        return f"SplitSegment({list(self._segments)})"

    @property
    def positions(self) -> int | None:
        """See `Segment`."""
        return self._segments[0].positions

    def parameters(self) -> Mapping[int, Mapping[str, nn.Parameter]]:
        """See `Segment`."""
        return {number: named for one in reversed(self._segments) for number, named in one.parameters().items()}

    def buffers(self) -> Mapping[int, Mapping[str, Tensor]]:
        """See `Segment`."""
        return {unit: named for one in self._segments for unit, named in one.buffers().items()}

    def forward(
        self, values: Values, start: int, end: int, seed: int, labels: Values = (), shares: Shares = ()
    ) -> Values:
        """See `Segment`."""
        for one in self._segments:
            low, high = max(start, one.start), min(end, one.end)
            if low < high:
                values = one.forward(moved(values, one.device), low, high, seed, moved(labels, one.device), shares)
        return values
