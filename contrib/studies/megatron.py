"""A step of training as Megatron-LM lays it out (arXiv 2104.04473), on a network that it knows nothing of.

Ranks are devices in a given order: tensor-parallel groups are neighbours, then data-parallel ones, then pipelines. Sends between
stages are waited for (1F1B without overlap), all-reduces are rings in the order of ranks, and of all shapes the best is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from swarmnode.plan.cost import step_s, transfer_s
from swarmnode.plan.offline.grid import Grid
from swarmnode.plan.offline.planner_files import Scenario
from swarmnode.plan.spans.flow import Floats

ALL_REDUCES = 4  # of activations, in each layer of a tensor-parallel model: two on the way forward, two on the way back


@dataclass(frozen=True)
class Step:
    """Step of a model of equal layers: seconds of one layer on one device (there and back), bytes, and microbatches over
    all pipelines."""

    layers: int
    layer_s: float
    activation_bytes: float
    layer_gradient_bytes: float
    microbatches: int


@dataclass(frozen=True)
class Shape:
    """Numbers of devices that share a layer, of successive stages, and of pipelines that average."""

    tensor: int
    stages: int
    pipelines: int


def shapes(devices: int, layers: int) -> Iterator[Shape]:
    """Yield all shapes that use every device and cut the layers evenly."""
    for tensor in (1, 2, 4, 8):
        for stages in range(1, devices // tensor + 1):
            if devices % (tensor * stages) == 0 and layers % stages == 0:
                yield Shape(tensor, stages, devices // (tensor * stages))


def best_step_s(network: Scenario, ranks: Sequence[int], step: Step) -> tuple[float, Shape]:
    """Return the seconds of a step in the fastest shape, and the shape."""
    fitting = shapes(len(ranks), step.layers)
    return min(((seconds(network, ranks, step, shape), shape) for shape in fitting), key=lambda found: found[0])


def seconds(network: Scenario, ranks: Sequence[int], step: Step, shape: Shape) -> float:
    """Return the seconds of one step in this shape."""
    layout: Grid = np.array(ranks).reshape(shape.stages, shape.pipelines, shape.tensor)
    layers = step.layers / shape.stages
    stages_s = []
    for stage in layout:
        shared_s = max(ring_s(network, group, step.activation_bytes) for group in stage)
        stages_s.append(layers * (step.layer_s / shape.tensor + ALL_REDUCES * shared_s))
    hops_s = [
        float(_sending_s(network, here, there, step.activation_bytes / shape.tensor).max())
        for here, there in pairwise(layout)
    ]
    waits_s = [before + after for before, after in pairwise([0.0, *hops_s, 0.0])]
    gradient_bytes = layers * step.layer_gradient_bytes / shape.tensor
    averaging_s = max(ring_s(network, group, gradient_bytes) for stage in layout for group in stage.T)
    return step_s(
        stages_s,
        hops_s,
        beat_s=max(stage_s + 2 * wait_s for stage_s, wait_s in zip(stages_s, waits_s, strict=True)),
        microbatches=step.microbatches / shape.pipelines,
        averaging_s=averaging_s,
    )


def ring_s(network: Scenario, members: Grid, size_bytes: float) -> float:
    """Return the seconds of an all-reduce around a ring, as slow as its slowest link; 0 for a single member."""
    count = len(members)
    if count == 1:
        return 0.0
    parts_s = _sending_s(network, members, np.roll(members, -1), size_bytes / count)
    return float(2 * (count - 1) * parts_s.max())


def _sending_s(network: Scenario, senders: Grid, receivers: Grid, size_bytes: float) -> Floats:
    sent_s: Floats = transfer_s(
        size_bytes, network.delay_s[senders, receivers], network.bandwidth_bps[senders, receivers]
    )
    return sent_s
