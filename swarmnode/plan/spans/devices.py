"""How a span lies on the devices of one node: over several of them, one behind another, or once on each of them.

A replica of the span is a pipeline of parts, and does as many positions per second as its slowest part; replicas add up. What
does most is chosen, and of what does as much the shorter pipelines, which hand over less often.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from swarmnode.plan.view import Span


@dataclass(frozen=True)
class DeviceView:
    """One device as the planner sees it. `fitting(start)`: how many units fit into its memory from that one on. Speeds count
    against one another alone: where none was measured all are alike."""

    fitting: Callable[[int], int]
    units_per_s: float = 1.0


@dataclass(frozen=True)
class DevicePart:
    """What one device holds of a span."""

    device: int
    span: Span


PipelineLayout = tuple[DevicePart, ...]
"""All units of a span, in order, each part on a device of its own"""


def lay_out(span: Span, devices: Sequence[DeviceView]) -> tuple[PipelineLayout, ...]:
    """The replicas that together do most; none where the span fits nowhere, not even over all devices."""
    layouts = [_replicate(span, devices, count) for count in range(1, len(devices) + 1)]
    return max(
        (layout for layout in layouts if layout),
        key=lambda layout: (throughput(layout, devices), -max(map(len, layout))),
        default=(),
    )


def throughput(layout: Sequence[PipelineLayout], devices: Sequence[DeviceView]) -> float:
    """Positions per second of all replicas together."""
    slowest_s = (max(part.span.units / devices[part.device].units_per_s for part in replica) for replica in layout)
    return sum(1 / pass_s for pass_s in slowest_s)


def _replicate(span: Span, devices: Sequence[DeviceView], count: int) -> tuple[PipelineLayout, ...]:
    """So many replicas, each on as many neighbouring devices as the next; those that do not fit are left out."""
    numbers = range(len(devices))
    bounds = [len(devices) * number // count for number in range(count + 1)]
    groups = (numbers[start:end] for start, end in pairwise(bounds))
    replicas = (_split(span, devices, group) for group in groups)
    return tuple(replica for replica in replicas if replica)


def _split(span: Span, devices: Sequence[DeviceView], group: Sequence[int]) -> PipelineLayout:
    """Over the devices of a group, so that the slowest part is done as soon as can be; nothing where it does not fit.

    Within a given time each device takes as many units as it can, which leaves least to those behind it (greedy bottleneck
    partition, as for PipeDream's stages, arXiv 1806.03377 section 3.1, with memory as a bound).
    """
    times_s = sorted({units / devices[number].units_per_s for number in group for units in range(1, span.units + 1)})
    best: PipelineLayout = ()
    low, high = 0, len(times_s)
    while low < high:
        middle = (low + high) // 2
        replica = _split_within(span, devices, group, times_s[middle])
        if replica:
            best, high = replica, middle
        else:
            low = middle + 1
    return best


def _split_within(span: Span, devices: Sequence[DeviceView], group: Sequence[int], pass_s: float) -> PipelineLayout:
    """Parts that take at most so long; nothing where there are none."""
    parts: list[DevicePart] = []
    start = span.start
    for number in group:
        device = devices[number]
        in_time = int(pass_s * device.units_per_s * (1 + 1e-9))
        end = min(span.end, start + min(in_time, device.fitting(start)))
        if end > start:
            parts.append(DevicePart(number, Span(start, end)))
            start = end
    return tuple(parts) if start == span.end else ()
