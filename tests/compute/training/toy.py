"""A segment of three units in plain torch: a linear layer, a batch norm, a head with a loss.

Boundary 0: (x_BF,). Labels: (labels_B,).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from swarmnode.compute.training.datasets.batches import Microbatch
from swarmnode.compute.training.device_learners import DeviceLearners
from swarmnode.compute.training.learner import Learner
from swarmnode.compute.training.segment import Segment, Values
from swarmnode.swarm.records.run import Run

FEATURES, CLASSES = 6, 4


class ToySegment(Segment):
    """All units, unless told otherwise; `breaks`: the unit whose output is NaN."""

    units = 3

    def __init__(self, start: int = 0, end: int = 3, *, breaks: int | None = None) -> None:
        self.start, self.end, self.breaks = start, end, breaks
        self.device = torch.device("cpu")
        self.passes = 0
        torch.manual_seed(3)
        self.modules = [nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, CLASSES)]

    def parameters(self) -> Mapping[int, Mapping[str, nn.Parameter]]:
        return {unit: dict(self.modules[unit].named_parameters()) for unit in range(self.start, self.end)}

    def buffers(self) -> Mapping[int, Mapping[str, Tensor]]:
        return {1: dict(self.modules[1].named_buffers())} if self.start <= 1 < self.end else {}

    def forward(self, values: Values, start: int, end: int, seed: int, labels: Values = ()) -> Values:
        self.passes += 1
        (x,) = values
        for unit in range(start, end):
            x = self.modules[unit](x)
            if unit == self.breaks:
                x = x / 0
        return (functional.cross_entropy(x, *labels),) if end == self.units else (x,)


def toy_values(index: int, samples: int = 8) -> Microbatch:
    """The data of one microbatch."""
    generator = torch.Generator().manual_seed(index)
    x_BF = torch.randn(samples, FEATURES, generator=generator) * (index + 1) + index
    return Microbatch((x_BF,), (torch.randint(0, CLASSES, (samples,), generator=generator),))


def one_learner(segment: ToySegment, run: Run) -> DeviceLearners:
    """Of a node with one device."""
    return DeviceLearners([Learner(segment, run)], segment)
