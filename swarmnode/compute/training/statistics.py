"""Running statistics (buffers of batch norms): how they move in a step, whoever computed which microbatch.

A forward pass in training mode moves them in place. Here every pass starts from the step's values and only the change that it
made is kept, under its microbatch. When the step commits, the statistics move by the mean of all microbatches' changes: as one
machine's would with the whole batch. So order, replays and recomputations do not show, and replicas keep equal statistics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

Changes = dict[int, dict[str, Tensor]]
"""By unit, then by name."""


class Statistics:
    """Buffers that move in training, by unit, and the sum of the changes that counted microbatches made in this step."""

    def __init__(self, buffers: Mapping[int, Mapping[str, Tensor]]) -> None:
        self.buffers = {
            unit: {name: buffer for name, buffer in sorted(named.items()) if buffer.dtype != torch.bool}
            for unit, named in buffers.items()
        }
        self._sums: Changes = {}
        self.clear()

    def __repr__(self) -> str:
        return f"Statistics({sum(map(len, self.buffers.values()))} buffers of {len(self.buffers)} units)"

    def save(self, start: int, end: int) -> Changes:
        """Copies of the buffers of units [start, end), before a pass."""
        return {
            unit: {name: buffer.clone() for name, buffer in named.items()}
            for unit, named in self.buffers.items()
            if start <= unit < end
        }

    def take_back(self, saved: Changes) -> Changes:
        """Put the buffers back as saved; returns what the pass between had changed."""
        changes: Changes = {}
        for unit, before in saved.items():
            buffers = self.buffers[unit]
            changes[unit] = {name: (buffers[name] - value).float() for name, value in before.items()}
            for name, value in before.items():
                buffers[name].data.copy_(value)  # data: graphs that are kept must not take it for a change
        return changes

    def count(self, changes: Changes) -> None:
        """Add the changes of one microbatch."""
        for unit, named in changes.items():
            for name, change in named.items():
                self._sums[unit][name] += change

    def sums(self, unit: int) -> Sequence[Tensor]:
        """The step's sums of changes in float32, names in order."""
        return list(self._sums.get(unit, {}).values())

    def move(self, unit: int, sums: Sequence[Tensor], microbatches: int) -> None:
        """Move the unit's buffers by the mean of all microbatches' changes."""
        for buffer, total in zip(self.buffers.get(unit, {}).values(), sums, strict=True):
            mean = total.to(buffer.device) / microbatches
            buffer.data.add_(mean if buffer.is_floating_point() else mean.round().to(buffer.dtype))

    def clear(self) -> None:
        """Forget the step's changes."""
        self._sums = {
            unit: {name: torch.zeros_like(buffer, dtype=torch.float32) for name, buffer in named.items()}
            for unit, named in self.buffers.items()
        }
