"""Part loading: it loads the layers of a span on a node's devices, and measures and estimates their speed."""

from __future__ import annotations

import asyncio
import functools
import statistics
from collections.abc import Callable, Sequence

import torch

from swarmnode.compute.capacity.capacity import Speeds, measure_training
from swarmnode.compute.graph.costs.estimate import UnitEstimate, estimate_span, estimate_units
from swarmnode.compute.graph.costs.rates import measure_rates
from swarmnode.compute.graph.segment import load_segment as load_graph_segment
from swarmnode.compute.graph.serialise import GraphCheckpoint
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.stopwatch import TRAINING_WORK, Stopwatch, Throttle, synchronize
from swarmnode.compute.training.learner import Learner
from swarmnode.compute.training.lm import SpanSegment, load_segment, load_twin
from swarmnode.compute.training.segment import Segment, Values, moved
from swarmnode.measuring.capability import Capability
from swarmnode.measuring.hardware import Hardware, LentDevice, Workplace
from swarmnode.plan.spans.devices import DevicePart
from swarmnode.serving.span_part import LoadedSpan
from swarmnode.swarm.records.run import Run
from swarmnode.training.worker.memory import TrainingMemory
from swarmnode.training.worker.pass_estimator import PassEstimator
from swarmnode.training.worker.training_parts import LoadUnits, TrainingPart

LoadedSegments = Sequence[Sequence[tuple[int, Segment]]]
"""Parts of each replica: the number of the device, and the segment that is ready to be trained there."""

BUDGET_S = 1.0  # for all passes, if it suffices for FEWEST_PASSES
FEWEST_PASSES, MOST_PASSES = 2, 5
LEASE = -1  # the lease of no coordinator
SMALL = 1e-3  # gradients too small to overflow


def dummy_run_s(learner: Learner, start: int, end: int, clock: Callable[[], float]) -> float:
    """Time a microbatch of the learner's run through layers [start, end). Returns the median seconds of passes after a warm-up.

    The learner must not have counted anything yet. Raises CheckpointError if inputs of the layers cannot be made up, ProtocolError
    or NotFinite if the layers cannot work with made-up inputs.
    """
    segment, run = learner.segment, learner.run
    values, labels = segment.dummies(start, run.microbatch, run.sequence)
    labels = (*labels, torch.ones(segment.means)) if run.weighs_labels else labels
    values, labels = moved(values, segment.device), moved(labels, segment.device)
    took_s: list[float] = []
    while len(took_s) < FEWEST_PASSES or (len(took_s) < MOST_PASSES and sum(took_s) < BUDGET_S):
        began_s = clock()
        _there_and_back(learner, start, end, values, labels)
        synchronize(segment.device)
        took_s.append(max(clock() - began_s, 1e-9))
    return statistics.median(took_s[1:])


def _there_and_back(learner: Learner, start: int, end: int, values: Values, labels: Values) -> None:
    try:
        outputs = learner.forward(LEASE, 0, start, end, values, labels)
        received = outputs if end < learner.segment.units else ()  # a loss has no incoming gradient
        grads = tuple(torch.full_like(one, SMALL) if one.is_floating_point() else None for one in received)
        learner.backward(LEASE, grads)
    finally:
        learner.discard()  # else the next pass would continue from these counts


def estimates(checkpoint: Checkpoint, run: Run) -> Sequence[UnitEstimate]:
    """Estimate the work of a microbatch in each layer. Raises CheckpointError if it cannot be estimated."""
    if isinstance(checkpoint, GraphCheckpoint):
        return estimate_units(checkpoint.graph, run.microbatch)
    return estimate_span(checkpoint, run.microbatch, run.sequence)


def measure(segment: Segment, clock: Callable[[], float], throttle: Throttle) -> Speeds:
    """Measure a segment's training speed on its device, as the device is lent. Returns empty speeds for a graph. A graph's inputs
    are known to its data alone, so its first microbatches tell its speed."""
    if not isinstance(segment, SpanSegment):
        return Speeds()
    position_s = 1 / measure_training(segment, clock=clock).training_units_per_s
    return Speeds(training_units_per_s=1 / throttle.lent_s(position_s, throttle.least_of_work_s(TRAINING_WORK)))


async def load_units(checkpoint: Checkpoint, part: DevicePart, hardware: Hardware) -> tuple[int, Segment]:
    """Load the layers of `part` for training. Returns the number of their device and the segment. Raises CheckpointError,
    LocalError."""
    load = _loading(checkpoint, str(hardware.lent[part.device].device.torch_device))
    return part.device, await asyncio.to_thread(load, *part.span)


def _loading(checkpoint: Checkpoint, device: str) -> LoadUnits:
    """Return a function that loads any range of layers onto `device`, with the weights that the swarm was created with."""
    if isinstance(checkpoint, GraphCheckpoint):
        return functools.partial(load_graph_segment, checkpoint.path, device=device)
    return functools.partial(load_segment, checkpoint, device=device)


async def load_served(checkpoint: Checkpoint, device: int, segment: Segment) -> LoadedSpan:
    """Return the layers of a training segment for serving; both share the same weights in memory."""
    assert isinstance(segment, SpanSegment)
    return LoadedSpan(device, await asyncio.to_thread(load_twin, checkpoint, segment))


def make_part(place: Workplace, checkpoint: Checkpoint, device: int, segment: Segment) -> TrainingPart:
    """Create a device's part of a replica, with its estimator and its memory."""
    lent, clock = place.hardware.lent[device], place.host.clock.compute
    estimated = functools.lru_cache(maxsize=1)(
        functools.partial(estimates, checkpoint)
    )  # called twice when a run begins
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
        place.executors[device],
        memory=TrainingMemory(lent.ledger, segment, estimated),
        stopwatch=Stopwatch(segment.device, clock=clock, throttle=lent.throttle),
        estimator=estimator,
        load=_loading(checkpoint, "cpu"),
    )


async def measure_part(place: Workplace, part: TrainingPart, lent: LentDevice) -> Capability:
    """Return the capability of a part's device: known from earlier work with any span, else measured on the part's thread. The
    speed in earlier work says more than a trial."""
    host, cache = place.host, place.speed_cache
    conditions = place.hardware.training_conditions(host.swarm.id, part.span.units, lent)
    known, clock = cache.newest(conditions), host.clock.monotonic
    if known.training_units_per_s:
        return Capability(known, conditions, cache, clock=clock)
    measuring = functools.partial(measure, part.segment, host.clock.compute, lent.throttle)
    return await part.call(
        "measure",
        lambda: Capability.of(conditions, cache, measuring, clock=clock),
        owner=f"units {part.span}",
    )
