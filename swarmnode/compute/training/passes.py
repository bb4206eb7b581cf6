"""Passes through layers of a segment, forward and back, in the precision that is fast on the device: autocast, TF32, and scaled
gradients in float16. Nothing is counted here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from swarmnode.compute.device import computes_in_bfloat16
from swarmnode.compute.training.block import Block, Changes
from swarmnode.compute.training.randomness import drawing
from swarmnode.compute.training.saved_activations import (
    Gradients,
    SavedActivations,
    SavedPiece,
    accumulate,
    check_finite,
    is_finite,
    pairs,
)
from swarmnode.compute.training.segment import Segment, Values
from swarmnode.compute.training.update_rules import LayerWatch

FIRST_EXPONENT = 16  # that of torch.amp.GradScaler
BACKOFF = 4  # lowers the exponent from one try of a pass to the next
GROWTH_PASSES = 100  # until the scale is doubled
LEAST = 1e-30  # smaller gradients are as good as none
VOLTA = 7  # major compute capability: the first tensor cores, which multiply float16 alone


def autocast_dtype(device: torch.device, *, wanted: bool = True) -> torch.dtype | None:
    """Return the dtype of autocast: bfloat16 since Ampere, float16 on Volta and Turing.

    None, which is float32, if neither is fast on the device or the run does not want autocast.
    """
    if not wanted or device.type != "cuda":
        return None
    if computes_in_bfloat16(device):
        return torch.bfloat16
    major, _minor = torch.cuda.get_device_capability(device)
    return torch.float16 if major >= VOLTA else None


@contextmanager
def autocast(device: torch.device, dtype: torch.dtype | None, *, alone: bool = True) -> Iterator[None]:
    """Enable autocast to `dtype` (None: off) in the `with` block; see `tf32` for `alone`."""
    with tf32(dtype, alone=alone), torch.autocast(device.type, dtype, enabled=dtype is not None):
        yield


@contextmanager
def tf32(dtype: torch.dtype | None, *, alone: bool = True) -> Iterator[None]:
    """Enable TF32 during a pass, forward or back, if autocast's dtype is bfloat16. A backward pass needs no autocast.

    The setting is the whole process's: other work, such as sessions in float32, keeps float32 outside of the pass. If other devices
    compute at the same time (not `alone`), it is not changed.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if alone and dtype is torch.bfloat16 else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class GradScaler:
    """Scaler of gradients for one layer on one device.

    The largest incoming gradient is scaled to 2 ** `exponent`, which is never less than 1. A peer whose gradients overflow lowers
    the exponent by one each time, and others' gradients still have most of float16's range below them.
    """

    def __init__(self) -> None:
        self.exponent = FIRST_EXPONENT
        self._passes = 0  # passes without overflow since the last change

    def __repr__(self) -> str:
        return f"GradScaler(2 ** {self.exponent})"

    def gradients(self, outputs: Values, grads: Gradients, wanted: Sequence[Tensor]) -> list[Tensor | None] | None:
        """Return the float32 gradients of `wanted`, from those of `outputs`, whose graph stays.

        A tensor without a gradient gets None. The whole result is None if gradients overflow at every scale, or incoming ones are
        NaN or infinite. Without overflow it waits once for the device.
        """
        device = outputs[0].device
        # A power of two above the largest magnitude, on the device of the gradients, without waiting for it.
        magnitudes = [gradient.detach().float().abs().max() for gradient in grads if gradient is not None]
        largest = torch.stack(magnitudes).max().clamp(min=LEAST).log2().ceil().exp2().to(device)
        for exponent in range(self.exponent, -1, -BACKOFF):
            scale = 2.0**exponent / largest
            scaled = [None if gradient is None else gradient.to(device, torch.float32) * scale for gradient in grads]
            roots, seeds = pairs(outputs, scaled)
            if not roots:
                return [None] * len(wanted)
            found: list[Tensor | None] = [
                *torch.autograd.grad(roots, wanted, seeds, retain_graph=True, allow_unused=True)
            ]
            if is_finite([*found, largest]):  # a unit's mask might hide an incoming NaN
                self._learn(overflowed=exponent < self.exponent)
                for place, gradient in enumerate(found):  # one by one: they are as large as the unit
                    found[place] = None if gradient is None else gradient.float() / scale
                return found
            if not is_finite(grads):  # no scale is at fault
                return None
        self._learn(overflowed=True)
        return None

    def _learn(self, *, overflowed: bool) -> None:
        self._passes = 0 if overflowed else self._passes + 1
        if overflowed:
            self.exponent = max(0, self.exponent - 1)
        elif self._passes == GROWTH_PASSES:
            self.exponent, self._passes = min(FIRST_EXPONENT, self.exponent + 1), 0


class Passes:
    """Passes through a segment with these blocks. `alone`: no other device of this process computes at the same time."""

    def __init__(self, segment: Segment, blocks: Mapping[int, Block], *, alone: bool) -> None:
        self._segment = segment
        self._blocks = blocks
        self._alone = alone
        self._scalers = {unit: GradScaler() for unit in range(segment.start, segment.end)}

    def compute(
        self, about: SavedActivations, start: int, end: int, inputs: Values
    ) -> tuple[Values, dict[int, Changes]]:
        """Run layers [start, end). Returns the outputs, and by layer the changes of running statistics, which are restored."""
        before = {unit: self._blocks[unit].save() for unit in range(start, end)}
        means: dict[int, Changes] = {unit: {} for unit in range(start, end)}
        device = self._segment.device
        try:
            evaluating = self._evaluating() if about.evaluates else nullcontext()
            watching = nullcontext() if about.evaluates else self._watching(means)
            with watching, evaluating, drawing(device), autocast(device, about.autocast_dtype, alone=self._alone):
                given = (about.labels, about.shares) if about.shares else (about.labels,)
                outputs = self._segment.forward(inputs, start, end, about.seed, *given)
        finally:
            for unit, values in before.items():
                means[unit].update(self._blocks[unit].restore(values))
        return outputs, means

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Enter the context of held-out data: by the parameters' average, if there is one."""
        with ExitStack() as stack:
            for block in self._blocks.values():
                stack.enter_context(block.averaged())
            stack.enter_context(self._segment.evaluating())
            yield

    def _watching(self, means: Mapping[int, Changes]) -> AbstractContextManager[object]:
        """Return a context in which passes add the means of watched layers to `means`, by unit."""
        watched = {
            id(self._blocks[unit].parameters[name]): (changes, name)
            for unit, changes in means.items()
            for name in self._blocks[unit].watched
        }
        return LayerWatch(watched) if watched else nullcontext()

    def accumulate(self, about: SavedActivations, piece: SavedPiece, grads: Gradients) -> Gradients:
        """Return the gradients of a piece's inputs. Those of its parameters are added to their `grad`."""
        outputs = self._outputs(about, piece)
        with tf32(about.autocast_dtype, alone=self._alone):
            return accumulate(outputs, grads, piece.inputs)

    def gradients(
        self, about: SavedActivations, piece: SavedPiece, grads: Gradients, wanted: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Return the gradients of `wanted`, inputs and parameters of a piece; None for those without one.

        In float16 they are scaled meanwhile. If they overflow at every scale, the layer is computed again in float32.
        Raises NotFinite if the gradients that came to the pass's end are NaN or infinite.
        """
        trained = [one for one in wanted if one.requires_grad]
        if len(trained) < len(wanted):  # frozen ones have none
            known = iter(self.gradients(about, piece, grads, trained))
            return [next(known) if one.requires_grad else None for one in wanted]
        if not wanted or all(gradient is None for gradient in grads):
            return [None] * len(wanted)
        outputs = self._outputs(about, piece)
        if about.in_float16:
            found = self._scalers[piece.start].gradients(outputs, grads, wanted)
            if found is not None:
                return found
            if piece.end == about.end:  # given by another peer; between units this pass made them
                check_finite(grads, about.end)
            del outputs
            outputs = self._outputs(replace(about, autocast_dtype=None), replace(piece, outputs=None))
        roots, seeds = pairs(outputs, grads)
        with tf32(about.autocast_dtype, alone=self._alone):
            return list(torch.autograd.grad(roots, wanted, seeds, allow_unused=True) if roots else [None] * len(wanted))

    def _outputs(self, about: SavedActivations, piece: SavedPiece) -> Values:
        """Return the outputs of a saved piece with their graph; compute them again if they were not kept."""
        if piece.outputs is not None:
            return piece.outputs
        with torch.enable_grad():
            outputs, changes = self.compute(about, piece.start, piece.end, piece.inputs)
        about.changes.update(changes)
        return outputs
