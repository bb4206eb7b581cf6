"""Loss scaling (Mixed Precision Training, arXiv 1710.03740) of the passes back through one unit, in float16.

Float16 has nothing below 6e-8 and nothing beyond 65,504. So the gradients that come in are multiplied by a power of two, as large
as the unit bears, and those that go out are divided by it. A pass back is linear: the scale is nobody else's business, and what
crosses boundaries and what is summed is unscaled float32. An overflow costs another try, where `torch.amp.GradScaler` leaves a
step out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from swarmnode.compute.training.saved_activations import Gradients, is_finite, pairs
from swarmnode.compute.training.segment import Values

FIRST_EXPONENT = 16  # as of torch.amp.GradScaler
BACKOFF = 4  # from one try of a pass to the next, as an exponent
GROWTH_PASSES = 100  # until the scale is doubled
LEAST = 1e-30  # gradients below are as good as none


class GradScaler:
    """Of one unit on one device. The largest gradient that comes in is scaled to 2 ** `exponent`, which is never less than 1: who
    sends what overflows lowers it by a half each time, and others' gradients still have most of float16's range below them.
    """

    def __init__(self) -> None:
        self.exponent = FIRST_EXPONENT
        self._passes = 0  # that did not overflow, since the last change

    def __repr__(self) -> str:
        return f"GradScaler(2 ** {self.exponent})"

    def gradients(self, outputs: Values, grads: Gradients, wanted: Sequence[Tensor]) -> list[Tensor | None] | None:
        """Of `wanted`, float32, by the gradients of `outputs`, whose graph stays; None where they overflow at every scale, or what
        came in is NaN or infinite. Waits once for the device, where nothing overflows."""
        device = outputs[0].device
        largest = _power_of_two_above(grads).to(device)
        for exponent in range(self.exponent, -1, -BACKOFF):
            scale = 2.0**exponent / largest
            scaled = [None if gradient is None else gradient.to(device, torch.float32) * scale for gradient in grads]
            roots, seeds = pairs(outputs, scaled)
            if not roots:
                return [None] * len(wanted)
            found: list[Tensor | None] = [
                *torch.autograd.grad(roots, wanted, seeds, retain_graph=True, allow_unused=True)
            ]
            if is_finite([*found, largest]):  # what a unit masks would hide what came in
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


def _power_of_two_above(grads: Gradients) -> Tensor:
    """The largest magnitude among them, on their device: nobody waits for it."""
    magnitudes = [gradient.detach().float().abs().max() for gradient in grads if gradient is not None]
    return torch.stack(magnitudes).max().clamp(min=LEAST).log2().ceil().exp2()
