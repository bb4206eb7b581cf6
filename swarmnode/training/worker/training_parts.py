"""Training parts: the parts of a node's layers on its devices, one behind another, or all layers on each of several devices.

A microbatch passes the parts of one replica, whose devices work on other microbatches meanwhile (GPipe, arXiv 1811.06965).
The replica is chosen once for each index of a step: two replicas that both count it would count it twice.

Part loading: it loads the layers of a span on a node's devices, and measures and estimates their speed.
"""

from __future__ import annotations

import asyncio
import functools
import statistics
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TypeVar

import torch

from swarmnode.codec.body import SHARED
from swarmnode.codec.training_messages import Forward
from swarmnode.compute.capacity.capacity import Speeds, measure_training
from swarmnode.compute.executor import Executor, Urgency
from swarmnode.compute.graph.costs.estimate import UnitEstimate, estimate_span, estimate_units
from swarmnode.compute.graph.costs.rates import measure_rates
from swarmnode.compute.graph.graph_segment import load_segment as load_graph_segment
from swarmnode.compute.graph.serialise import GraphCheckpoint
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.stopwatch import TRAINING_WORK, Stopwatch, Throttle, synchronize
from swarmnode.compute.training.device_learners import DeviceLearners
from swarmnode.compute.training.learner import Learner
from swarmnode.compute.training.lm import SpanSegment, load_segment, load_twin
from swarmnode.compute.training.segment import Segment, SplitSegment, moved, refound
from swarmnode.errors import LocalError
from swarmnode.ledger import Account, MemoryLedger
from swarmnode.measuring.capability import Capability
from swarmnode.measuring.hardware import Hardware, LentDevice, StageResources
from swarmnode.plan.spans.devices import DevicePart
from swarmnode.plan.view import Span
from swarmnode.serving.span_part import LoadedSpan
from swarmnode.swarm.records.run import Run
from swarmnode.training.worker.memory import MAX_IN_FLIGHT, PassEstimator, TrainingMemory, UnitTime

T = TypeVar("T")
LoadUnits = Callable[[int, int], Segment]
"""Function (start, end) that loads these units with the founder's weights. Raises CheckpointError, LocalError."""


@dataclass(eq=False)
class TrainingPart:
    """The part of a node's layers on one device: its thread, its memory, and the learner of the current run. Used on the
    event loop, except for the learner."""

    segment: Segment
    executor: Executor
    _: KW_ONLY
    memory: TrainingMemory
    stopwatch: Stopwatch
    estimator: PassEstimator | None = None
    load: LoadUnits | None = None

    def __post_init__(self) -> None:
        self.unit_time = UnitTime()
        self._learner: Learner | None = None

    def __repr__(self) -> str:
        return f"<TrainingPart {self.segment!r}>"

    @property
    def span(self) -> Span:
        """Layers [start, end) on this device."""
        return Span(self.segment.start, self.segment.end)

    @property
    def blocks(self) -> set[int]:
        """Numbers of the blocks of parameters on this device."""
        return {*self.segment.parameters(), *range(self.segment.start, self.segment.end)}

    @property
    def learner(self) -> Learner:
        """Learner of this device in the present training run. Raises LocalError before a run has begun."""
        if self._learner is None:
            raise LocalError("no training has begun here; begin one with `swarmnode train`")
        return self._learner

    async def begin(self, run: Run, step: int, *, follows: Collection[int], alone: bool) -> Learner:
        """Create the learner of a run, and estimate its microbatches. `follows` and `alone`: see `Learner`."""

        def make() -> Learner:
            recompute = self.memory.begin(run)
            return Learner(self.segment, run, step=step, recompute=recompute, follows=follows, alone=alone)

        learner = await self.call("begin a run", make, owner=f"step {step}")
        self.memory.hold(learner)
        await self.call("estimate a microbatch", lambda: self._estimate(learner), owner=f"step {step}")
        self._learner = learner
        return learner

    def refound(self) -> asyncio.Future[None]:
        """Load the weights that the swarm was created with, on the part's thread. The result raises CheckpointError,
        LocalError, or Full if the ledger has no room for another copy of a layer."""
        return self.call("load what the swarm was founded with", self._refound)

    def _refound(self) -> None:
        """Load one layer after another: there may be no room for a second copy of all. Raises LocalError if the part has no
        loader."""
        if self.load is None:
            raise LocalError("this device cannot load the weights that the swarm began with; restart the node")
        held = self.segment.parameters()
        for unit in range(self.segment.start, self.segment.end):
            tensors = (tensor for block in (unit, SHARED) for tensor in held.get(block, {}).values())
            with self.memory.ledger.reserve(Account.CHECKPOINTS, sum(tensor.nbytes for tensor in tensors)):
                refound(self.segment, self.load(unit, unit + 1))

    def _estimate(self, learner: Learner) -> None:
        self.unit_time.begin(0.0 if self.estimator is None else self.estimator.unit_s(learner))

    def call(self, kind: str, function: Callable[[], T], *, owner: str = "") -> asyncio.Future[T]:
        """Run a function on the part's thread, between passes. Returns the future result."""
        return self.executor.call(Urgency.CONTROL, function, kind=kind, owner=owner)

    def drop(self, place: int) -> asyncio.Future[None]:
        """Forget the microbatch `place`, whose gradients will not come back, after the device's pending work for it."""

        def drop() -> None:
            if self._learner is not None:
                self._learner.drop(place)

        return self.call("drop a microbatch", drop)


class TrainingParts:
    """Parts of a node's layers for training, one for each device, by replica, in order. Used on the event loop."""

    def __init__(self, replicas: Sequence[Sequence[TrainingPart]]) -> None:
        self.replicas = tuple(tuple(replica) for replica in replicas)
        segments = [part.segment for part in self.replicas[0]]
        self.segment: Segment = segments[0] if len(segments) == 1 else SplitSegment(segments)
        self._step = (b"", -1)  # run and step of `_replica_of`
        self._replica_of: dict[int, int] = {}  # by microbatch index
        self._in_flight: dict[int, int] = {}  # replica by place

    def __iter__(self) -> Iterator[TrainingPart]:
        return (part for replica in self.replicas for part in replica)

    def __len__(self) -> int:
        return sum(map(len, self.replicas))

    @property
    def span(self) -> Span:
        """Layers [start, end) that the node trains, on all its devices."""
        return Span(self.segment.start, self.segment.end)

    @property
    def shared_executor(self) -> Executor:
        """The thread for work that concerns all parts: that of the first device."""
        return self.replicas[0][0].executor

    @property
    def ledger(self) -> MemoryLedger:
        """Ledger of the first device, which averages with other peers' replicas."""
        return self.replicas[0][0].memory.ledger

    @property
    def unit_s(self) -> float:
        """Seconds for a microbatch through one layer, forward and backward, while microbatches follow one another. The
        slowest device of a replica decides, and replicas work side by side. 0 if unknown."""
        slowest_s = [max(part.span.units * part.unit_time.unit_s for part in replica) for replica in self.replicas]
        timed = [pass_s for pass_s in slowest_s if pass_s]
        return 1 / (self.span.units * sum(1 / pass_s for pass_s in timed)) if timed else 0.0

    @property
    def window(self) -> int:
        """Number of microbatches that have room at once; 0 if their size is unknown."""
        windows = [min(part.memory.window for part in replica) for replica in self.replicas]
        return min(MAX_IN_FLIGHT, sum(windows)) if all(windows) else 0

    async def begin(self, run: Run, step: int) -> DeviceLearners:
        """Create a learner on each device for a training run, from step `step` on."""
        held: set[int] = set()
        learners = []
        for part in self:
            learners.append(await part.begin(run, step, follows=held & part.blocks, alone=len(self) == 1))
            held |= part.blocks
        return DeviceLearners(learners, self.segment)

    async def refound(self) -> None:
        """Load the weights that the swarm was created with, on all devices. Raises CheckpointError, LocalError, Full."""
        for part in self:
            await part.refound()

    # -- microbatches

    def admit(self, body: Forward, place: int) -> bool:
        """Choose the replica for a microbatch, and reserve memory on all its devices until the microbatch is `ended`. Returns
        False, and reserves nothing, if one of them has no room."""
        # The replica that had this index in this step, else the one with the least load for its speed.
        step = body.run, body.step
        if step != self._step:
            self._step, self._replica_of = step, {}
        chosen = self._replica_of.get(body.number)
        replica = min(range(len(self.replicas)), key=self._load) if chosen is None else chosen
        admitted: list[TrainingPart] = []
        for part in self.replicas[replica]:
            if not part.memory.admit(place):
                for earlier in admitted:
                    earlier.memory.ended(place)
                return False
            admitted.append(part)
        self._replica_of[body.number] = replica
        self._in_flight[place] = replica
        return True

    def passed(self, body: Forward, place: int) -> list[tuple[TrainingPart, Span]]:
        """Return the parts that an admitted microbatch passes, in order, and the layers in each."""
        hop = body.route[body.hop]
        parts = self.replicas[self._in_flight[place]]
        spans = [Span(max(hop.start, part.span.start), min(hop.end, part.span.end)) for part in parts]
        return [(part, span) for part, span in zip(parts, spans, strict=True) if span.units > 0]

    def ended(self, place: int) -> None:
        """Free the memory of a microbatch. Safe to call twice."""
        replica = self._in_flight.pop(place, None)
        for part in () if replica is None else self.replicas[replica]:
            part.memory.ended(place)

    def _load(self, replica: int) -> float:
        slowest_s = max(part.span.units * part.unit_time.unit_s for part in self.replicas[replica])
        return (1 + list(self._in_flight.values()).count(replica)) * (slowest_s or 1.0)

    # -- memory

    def average(self, run: Run) -> None:
        """Reserve memory for averaging with other peers' replicas; it is counted on the first device, where averaging takes
        place."""
        first, *others = self.replicas[0]
        gradient_bytes = sum(part.memory.gradient_bytes for part in (first, *others))
        copies = any(part.segment.device != first.segment.device for part in others)
        first.memory.average(run, gradient_bytes, copies=int(copies))

    def close(self) -> None:
        """Free the memory of all devices' parts."""
        for part in self:
            part.memory.close()


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
        try:
            outputs = learner.forward(LEASE, 0, start, end, values, labels)
            received = outputs if end < learner.segment.units else ()  # a loss has no incoming gradient
            grads = tuple(torch.full_like(one, SMALL) if one.is_floating_point() else None for one in received)
            learner.backward(LEASE, grads)
        finally:
            learner.discard()  # else the next pass would continue from these counts
        synchronize(segment.device)
        took_s.append(max(clock() - began_s, 1e-9))
    return statistics.median(took_s[1:])


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


def make_part(place: StageResources, checkpoint: Checkpoint, device: int, segment: Segment) -> TrainingPart:
    """Create a device's part of a replica, with its estimator and its memory."""
    lent, clock = place.hardware.lent[device], place.host.clock.compute
    # called twice when a run begins
    estimated = functools.lru_cache(maxsize=1)(functools.partial(estimates, checkpoint))
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


async def measure_part(place: StageResources, part: TrainingPart, lent: LentDevice) -> Capability:
    """Return the capability of a part's device: known from earlier work with any span, else measured on the part's thread. The
    speed in earlier work says more than a trial."""
    host, cache = place.host, place.speed_cache
    conditions = place.hardware.training_conditions(host.swarm.id, part.span.units, lent)
    known, clock = cache.newest(conditions), host.clock.monotonic
    if known.training_units_per_s:
        return Capability(known, conditions, cache, clock=clock)
    measuring = functools.partial(measure, part.segment, host.clock.compute, lent.throttle)
    return await part.call(
        "measure", lambda: Capability.of(conditions, cache, measuring, clock=clock), owner=f"units {part.span}"
    )
