"""Passes through units of a segment, there and back, in the precision that its device is fast at. Nothing is counted here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from swarmnode.compute.training.block import Block, Changes
from swarmnode.compute.training.grad_scaler import GradScaler
from swarmnode.compute.training.precision import autocast, tf32
from swarmnode.compute.training.randomness import drawing
from swarmnode.compute.training.saved_activations import (
    Gradients,
    SavedActivations,
    SavedPiece,
    accumulate,
    check_finite,
    pairs,
)
from swarmnode.compute.training.segment import Segment, Values


class Passes:
    """Of a segment with these blocks. `alone`: no other device of this process computes at the same time."""

    def __init__(self, segment: Segment, blocks: Mapping[int, Block], *, alone: bool) -> None:
        self._segment = segment
        self._blocks = blocks
        self._alone = alone
        self._scalers = {unit: GradScaler() for unit in range(segment.start, segment.end)}

    def __repr__(self) -> str:
        return f"<Passes through {self._segment!r}, {self._scalers}>"

    def compute(
        self, about: SavedActivations, start: int, end: int, inputs: Values
    ) -> tuple[Values, dict[int, Changes]]:
        """Run units; running statistics are as before it, and what it would have changed is returned."""
        before = {unit: self._blocks[unit].save() for unit in range(start, end)}
        device = self._segment.device
        try:
            with drawing(device), autocast(device, about.autocast_dtype, alone=self._alone):
                outputs = self._segment.forward(inputs, start, end, about.seed, about.labels)
        finally:
            changes = {unit: self._blocks[unit].take_back(values) for unit, values in before.items()}
        return outputs, changes

    def accumulate(self, about: SavedActivations, piece: SavedPiece, grads: Gradients) -> Gradients:
        """Gradients of what came into a piece; those of its parameters are added to their `grad`."""
        outputs = self._outputs(about, piece)
        with tf32(about.autocast_dtype, alone=self._alone):
            return accumulate(outputs, grads, piece.inputs)

    def gradients(
        self, about: SavedActivations, piece: SavedPiece, grads: Gradients, wanted: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Of `wanted`, inputs and parameters of a piece. In float16 they are scaled meanwhile; where they overflow at every scale
        the unit is computed again in float32. Raises NotFinite where those that came to the pass's end are NaN or infinite."""
        if not wanted or all(gradient is None for gradient in grads):
            return [None] * len(wanted)
        outputs = self._outputs(about, piece)
        if about.in_float16:
            found = self._scalers[piece.start].gradients(outputs, grads, wanted)
            if found is not None:
                return found
            if piece.end == about.end:  # others' word; between units it is this pass's own
                check_finite(grads, about.end)
            del outputs
            outputs = self._outputs(replace(about, autocast_dtype=None), replace(piece, outputs=None))
        roots, seeds = pairs(outputs, grads)
        with tf32(about.autocast_dtype, alone=self._alone):
            return list(torch.autograd.grad(roots, wanted, seeds, allow_unused=True) if roots else [None] * len(wanted))

    def _outputs(self, about: SavedActivations, piece: SavedPiece) -> Values:
        """Of a piece, with their graph."""
        if piece.outputs is not None:
            return piece.outputs
        with torch.enable_grad():
            return self.compute(about, piece.start, piece.end, piece.inputs)[0]
