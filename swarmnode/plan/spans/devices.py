"""Layout of a span on the devices of one node: a pipeline over several devices, or a replica on each of them.

A replica of the span is a pipeline of parts, and does as many positions per second as its slowest part; replicas add up. The
layout with the highest throughput wins, and among equal ones that with the shorter pipelines, which hand over less often.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from swarmnode.plan.view import Span


@dataclass(frozen=True)
class DeviceView:
    """Device as the planner sees it. `fitting(start)` is the number of layers from `start` on that fit into its memory. Only the
    ratio of the speeds matters; unmeasured devices keep the default."""

    fitting: Callable[[int], int]
    units_per_s: float = 1.0


@dataclass(frozen=True)
class DevicePart:
    """Layers of one node that one of its devices holds."""

    device: int
    span: Span


PipelineLayout = tuple[DevicePart, ...]
"""All units of a span, in order, each part on a device of its own"""


def lay_out(span: Span, devices: Sequence[DeviceView]) -> tuple[PipelineLayout, ...]:
    """Return the replicas with the highest joint throughput; empty if the span does not fit even over all devices."""
    layouts = [_replicate(span, devices, count) for count in range(1, len(devices) + 1)]
    return max(
        (layout for layout in layouts if layout),
        key=lambda layout: (throughput(layout, devices), -max(map(len, layout))),
        default=(),
    )


def throughput(layout: Sequence[PipelineLayout], devices: Sequence[DeviceView]) -> float:
    """Return the positions per second of all replicas together."""
    slowest_s = (max(part.span.units / devices[part.device].units_per_s for part in replica) for replica in layout)
    return sum(1 / pass_s for pass_s in slowest_s)


def _replicate(span: Span, devices: Sequence[DeviceView], count: int) -> tuple[PipelineLayout, ...]:
    """Lay out up to `count` replicas on even groups of neighbouring devices; leave out replicas that do not fit."""
    numbers = range(len(devices))
    bounds = [len(devices) * number // count for number in range(count + 1)]
    groups = (numbers[start:end] for start, end in pairwise(bounds))
    replicas = (_split(span, devices, group) for group in groups)
    return tuple(replica for replica in replicas if replica)


def _split(span: Span, devices: Sequence[DeviceView], group: Sequence[int]) -> PipelineLayout:
    """Split `span` over the devices of `group` so that the slowest part is as fast as possible; empty if it does not fit.

    Within a given time each device takes as many layers as it can, which leaves the least to the devices behind it. This is the
    greedy bottleneck partition of PipeDream's stages (arXiv 1806.03377 section 3.1), with memory as a bound.
    """
    times_s = sorted({units / devices[number].units_per_s for number in group for units in range(1, span.units + 1)})
    best: PipelineLayout = ()
    low, high = 0, len(times_s)
    while low < high:
        middle = (low + high) // 2
        parts: list[DevicePart] = []
        start = span.start
        for number in group:
            device = devices[number]
            in_time = int(times_s[middle] * device.units_per_s * (1 + 1e-9))
            end = min(span.end, start + min(in_time, device.fitting(start)))
            if end > start:
                parts.append(DevicePart(number, Span(start, end)))
                start = end
        replica = tuple(parts) if start == span.end else ()
        if replica:
            best, high = replica, middle
        else:
            low = middle + 1
    return best
