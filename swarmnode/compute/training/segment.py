"""Segment: some layers of any model as training sees them, whether a transformers span or a piece of a graph."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from swarmnode.errors import CheckpointError, ProtocolError, UsageError
from swarmnode.swarm.records.run import MAX_MICROBATCHES, Recipe, Run

Shares = tuple[float, ...]
"""Factors of the means over labels in a microbatch's loss, one for each mean; empty if the means have no factors."""
Values = tuple[Tensor, ...]
"""Values that cross the boundary before a unit: floats (some take gradients), and whole numbers that only pass by.

Whole numbers may stay on the host, which checks them first; a unit moves those that it needs to its device.
"""


def moved(values: Values, device: torch.device) -> Values:
    """Return `values` with floating-point tensors moved to `device`, and other tensors unchanged."""
    return tuple(value.to(device) if value.is_floating_point() else value for value in values)


class Segment(ABC):
    """Layers [start, end) of a model of `units` layers, ready to be trained. Not safe for use from two threads at once.

    Parameters belong to blocks: block u is layer u's own; SHARED holds the parameters that the first and last layer have in common,
    and a holder of either of the two holds it.
    """

    start: int
    end: int
    units: int
    device: torch.device
    means: int = 0
    """Number of means over labels that the loss adds up."""
    expert_load: float = 0.0
    """Load of the busiest expert over the mean load, in the last pass to the model's end; 0 if no losses of routers are computed"""
    is_portable: bool = True
    """Whether other devices compute the same except for rounding: random numbers are not drawn by the device"""

    @property
    def positions(self) -> int | None:
        """Most tokens of a sample; None if the model has no limit, or no tokens."""
        return None

    @abstractmethod
    def parameters(self) -> Mapping[int, Mapping[str, nn.Parameter]]:
        """Return the parameters by block, then by name as in the model's state dict; no parameter twice."""

    @abstractmethod
    def buffers(self) -> Mapping[int, Mapping[str, Tensor]]:
        """Return the persistent buffers (running statistics of batch norms) by layer, then by name."""

    @abstractmethod
    def forward(
        self, values: Values, start: int, end: int, seed: int, labels: Values = (), shares: Shares = ()
    ) -> Values:
        """Run layers [start, end) in training mode on the values at boundary `start` and return the values at boundary `end`.

        At the end of the model that is the mean loss of the microbatch, a scalar. Only the last layer uses `labels`, the inputs of
        the model that it takes, and `shares`, the factors of the microbatch's means over labels.

        Random numbers follow from (seed, layer) alone, so that another split, a recomputation or a replay draws the same.
        """

    def aim(self, recipe: Recipe) -> None:
        """Set the objective (loss and its terms) of the passes that follow. Raises UsageError if the model cannot have it."""
        check_objective(recipe)

    def mask_bytes(self, run: Run) -> int:
        """Return the bytes of the attention mask of one microbatch of a run; 0 if there is none, or a layer's own code makes it."""
        return 0

    def evaluating(self) -> AbstractContextManager[None]:
        """Return a context in which passes are of held-out data: without dropout. Raises UsageError if the model cannot do that."""
        raise UsageError("held-out data are for language models that are split at their layers: leave out --eval-every")

    def dummies(self, boundary: int, batch: int, sequence: int) -> tuple[Values, Values]:
        """Return made-up values at a boundary, and labels, for a microbatch of `batch` samples.

        They have the right shapes, and take as long to compute with as real ones. Raises CheckpointError if only the data has them.
        """
        raise CheckpointError("no made-up values fit these layers: only their data has them")


def check_objective(recipe: Recipe) -> None:
    """Raise UsageError if a recipe changes the objective, which an exported module brings along."""
    if recipe.label_smoothing or recipe.z_loss or recipe.watches_routers:
        raise UsageError(
            "--label-smoothing, --z-loss, --router-balance and --router-z-loss are for language models that are split at "
            "their layers: leave them out, or export a module with such a loss"
        )


def refound(segment: Segment, founding: Segment) -> None:
    """Copy the parameters and buffers of another segment, which has some of its layers, into a segment."""
    with torch.no_grad():
        for held, theirs in ((segment.parameters(), founding.parameters()), (segment.buffers(), founding.buffers())):
            for block, tensors in theirs.items():
                for name, tensor in tensors.items():
                    held[block][name].copy_(tensor)


class SplitSegment(Segment):
    """Neighbouring segments, each on a device of its own, as one. The parameters that the ends share are the first one's."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segments = tuple(segments)
        first, last = segments[0], segments[-1]
        self.start, self.end, self.units, self.device = first.start, last.end, first.units, first.device
        self.is_portable, self.means = first.is_portable, last.means

    def __repr__(self) -> str:
        return f"SplitSegment({list(self._segments)})"

    @property
    def positions(self) -> int | None:
        """Most tokens of a sample, see `Segment`; None if there is no limit."""
        return self._segments[0].positions

    def mask_bytes(self, run: Run) -> int:
        """Return the bytes of one segment's mask, see `Segment`: each device has its own."""
        return self._segments[0].mask_bytes(run)

    def parameters(self) -> Mapping[int, Mapping[str, nn.Parameter]]:
        """Return the parameters of all segments by block, see `Segment`."""
        return {number: named for one in reversed(self._segments) for number, named in one.parameters().items()}

    def buffers(self) -> Mapping[int, Mapping[str, Tensor]]:
        """Return the buffers of all segments by layer, see `Segment`."""
        return {unit: named for one in self._segments for unit, named in one.buffers().items()}

    def aim(self, recipe: Recipe) -> None:
        """Take over the objective of a run on each device, see `Segment`."""
        for one in self._segments:
            one.aim(recipe)

    def forward(
        self, values: Values, start: int, end: int, seed: int, labels: Values = (), shares: Shares = ()
    ) -> Values:
        """Run layers [start, end) in training mode, each on its own device. Inputs and result are those of `Segment.forward`."""
        for one in self._segments:
            low, high = max(start, one.start), min(end, one.end)
            if low < high:
                values = one.forward(moved(values, one.device), low, high, seed, moved(labels, one.device), shares)
        self.expert_load = self._segments[-1].expert_load
        return values


def apart(labels: Values, means: int) -> tuple[Values, Shares]:
    """Return the labels without the last tensor, and the shares in it, one for each of the `means`.

    Raises ProtocolError if the last tensor does not hold `means` valid shares in float32.
    """
    *others, last = labels or (torch.empty(0),)
    if last.dtype == torch.float32 and last.shape == (means,):
        shares = tuple(last.tolist())
        if all(0 <= share <= MAX_MICROBATCHES for share in shares):
            return tuple(others), shares
    raise ProtocolError("the labels do not end with the shares of their microbatch")
