"""Part loading: a span's units onto a node's devices, ready to be trained, served as they are learnt, and measured."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence

from swarmnode.compute.executor import Executor
from swarmnode.compute.graph.checkpoint import GraphCheckpoint
from swarmnode.compute.graph.costs.estimate import UnitEstimate, estimate_units
from swarmnode.compute.graph.costs.rates import measure_rates
from swarmnode.compute.graph.costs.span_estimate import estimate_span
from swarmnode.compute.graph.segment import load_segment as load_graph_segment
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.speed import Speeds, measure_training
from swarmnode.compute.stopwatch import Stopwatch
from swarmnode.compute.throttle import TRAINING_WORK, Throttle
from swarmnode.compute.training.dummy_run import dummy_run_s
from swarmnode.compute.training.lm import SpanSegment, load_segment, load_twin
from swarmnode.compute.training.segment import Segment
from swarmnode.plan.spans.devices import DevicePart
from swarmnode.roles.host import Host
from swarmnode.roles.measuring.capability import Capability, SpeedCache
from swarmnode.roles.serving.hardware import Hardware, LentDevice
from swarmnode.roles.serving.span_part import LoadedSpan
from swarmnode.roles.training.worker.memory import TrainingMemory
from swarmnode.roles.training.worker.pass_estimator import PassEstimator
from swarmnode.roles.training.worker.training_parts import LoadUnits, TrainingPart
from swarmnode.swarm.records.run import Run

LoadedSegments = Sequence[Sequence[tuple[int, Segment]]]
"""Of each replica its parts: the number of the device, and the units that are ready to be trained there"""


def estimates(checkpoint: Checkpoint, run: Run) -> Sequence[UnitEstimate]:
    """Of all units for a microbatch. Raises CheckpointError where the work cannot be estimated."""
    if isinstance(checkpoint, GraphCheckpoint):
        return estimate_units(checkpoint.graph, run.microbatch)
    return estimate_span(checkpoint, run.microbatch, run.sequence)


def measure(segment: Segment, clock: Callable[[], float], throttle: Throttle) -> Speeds:
    """Before anything is trained, as a device is lent. What a graph's inputs are is known to its data alone: its first real work
    tells."""
    if not isinstance(segment, SpanSegment):
        return Speeds()
    position_s = 1 / measure_training(segment, clock=clock).training_units_per_s
    return Speeds(training_units_per_s=1 / throttle.lent_s(position_s, throttle.least_of_work_s(TRAINING_WORK)))


async def load_units(checkpoint: Checkpoint, part: DevicePart, hardware: Hardware) -> tuple[int, Segment]:
    """Units that are ready to be trained, and the number of their device. Raises CheckpointError, LocalError."""
    load = _loading(checkpoint, str(hardware.lent[part.device].device.torch_device))
    return part.device, await asyncio.to_thread(load, *part.span)


def _loading(checkpoint: Checkpoint, device: str) -> LoadUnits:
    """Of units as the swarm was founded with them."""
    if isinstance(checkpoint, GraphCheckpoint):
        return functools.partial(load_graph_segment, checkpoint.path, device=device)
    return functools.partial(load_segment, checkpoint, device=device)


async def load_served(checkpoint: Checkpoint, device: int, segment: Segment) -> LoadedSpan:
    """What is served of a part, as the training makes it."""
    assert isinstance(segment, SpanSegment)
    return LoadedSpan(device, await asyncio.to_thread(load_twin, checkpoint, segment))


def make_part(
    host: Host, checkpoint: Checkpoint, hardware: Hardware, executors: Sequence[Executor], device: int, segment: Segment
) -> TrainingPart:
    """A device's part of a replica, which estimates its passes and counts its memory."""
    lent = hardware.lent[device]
    estimated = functools.lru_cache(maxsize=1)(functools.partial(estimates, checkpoint))  # asked twice as a run begins
    clock = host.clock.compute
    estimator = PassEstimator(
        segment.device,
        estimated,
        functools.partial(measure_rates, clock=clock),
        functools.partial(dummy_run_s, clock=clock),
        lent.ledger,
        throttle=lent.throttle,
    )
    return TrainingPart(
        segment,
        executors[device],
        memory=TrainingMemory(lent.ledger, segment, estimated),
        stopwatch=Stopwatch(segment.device, clock=clock, throttle=lent.throttle),
        estimator=estimator,
        load=_loading(checkpoint, "cpu"),
    )


async def measure_part(
    host: Host, part: TrainingPart, hardware: Hardware, lent: LentDevice, cache: SpeedCache
) -> Capability:
    """On the part's own thread, unless this device is known with any span: what work has shown last says more than a trial."""
    conditions = hardware.training_conditions(host.swarm.id, part.span.units, lent)
    known, clock = cache.newest(conditions), host.clock.monotonic
    if known.training_units_per_s:
        return Capability(known, conditions, cache, clock=clock)
    measuring = functools.partial(measure, part.segment, host.clock.compute, lent.throttle)
    return await part.call(
        "measure",
        lambda: Capability.of(conditions, cache, measuring, clock=clock),
        owner=f"units {part.span}",
    )
