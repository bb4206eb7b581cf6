"""Training parts: the devices over which a node's units are laid, one behind another, or all units on each of several devices.

A microbatch goes through the parts of one replica, which computes for other microbatches at other devices meanwhile (GPipe, arXiv
1811.06965). Which one is decided once for each index of a step: replicas that both count it would count it twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TypeVar

from swarmnode.codec.body import SHARED
from swarmnode.codec.training_messages import Forward
from swarmnode.compute.executor import Executor, Urgency
from swarmnode.compute.stopwatch import Stopwatch
from swarmnode.compute.training.device_learners import DeviceLearners
from swarmnode.compute.training.learner import Learner
from swarmnode.compute.training.segment import Segment, SplitSegment, refound
from swarmnode.errors import LocalError
from swarmnode.ledger import Account, MemoryLedger
from swarmnode.plan.view import Span
from swarmnode.swarm.records.run import Run
from swarmnode.training.worker.memory import MAX_IN_FLIGHT, TrainingMemory
from swarmnode.training.worker.pass_estimator import PassEstimator, UnitTime

T = TypeVar("T")
LoadUnits = Callable[[int, int], Segment]
"""(start, end): these units as the swarm was founded with them. Raises CheckpointError, LocalError."""


@dataclass(eq=False)
class TrainingPart:
    """Part of a node's units on one device: its thread, its memory, and the learner of the run in force. Used
    on the loop, but for the learner."""

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
        """Its units."""
        return Span(self.segment.start, self.segment.end)

    @property
    def blocks(self) -> set[int]:
        """Numbers of the blocks that it holds."""
        return {*self.segment.parameters(), *range(self.segment.start, self.segment.end)}

    @property
    def learner(self) -> Learner:
        """Raises LocalError before a run has begun."""
        if self._learner is None:
            raise LocalError("no training has begun here")
        return self._learner

    async def begin(self, run: Run, step: int, *, follows: Collection[int], alone: bool) -> Learner:
        """A new learner for a run, which is not ready yet; see `Learner`."""

        def make() -> Learner:
            recompute = self.memory.begin(run)
            return Learner(self.segment, run, step=step, recompute=recompute, follows=follows, alone=alone)

        learner = await self.call("begin a run", make, owner=f"step {step}")
        self.memory.hold(learner)
        await self.call("estimate a microbatch", lambda: self._estimate(learner), owner=f"step {step}")
        self._learner = learner
        return learner

    def refound(self) -> asyncio.Future[None]:
        """The parameters that the swarm was founded with, on the part's thread. Raises CheckpointError, LocalError."""
        return self.call("load what the swarm was founded with", self._refound)

    def _refound(self) -> None:
        """One unit after another: there may be no room for a second copy of all."""
        if self.load is None:
            raise LocalError("nothing is known here of what the swarm was founded with")
        held = self.segment.parameters()
        for unit in range(self.segment.start, self.segment.end):
            tensors = (tensor for block in (unit, SHARED) for tensor in held.get(block, {}).values())
            with self.memory.ledger.reserve(Account.CHECKPOINTS, sum(tensor.nbytes for tensor in tensors)):
                refound(self.segment, self.load(unit, unit + 1))

    def _estimate(self, learner: Learner) -> None:
        self.unit_time.begin(0.0 if self.estimator is None else self.estimator.unit_s(learner))

    def call(self, kind: str, function: Callable[[], T], *, owner: str = "") -> asyncio.Future[T]:
        """Something between passes, on its thread."""
        return self.executor.call(Urgency.CONTROL, function, kind=kind, owner=owner)

    def drop(self, place: int) -> asyncio.Future[None]:
        """Forget a microbatch that will not come back, behind what the device computes for it still."""

        def drop() -> None:
            if self._learner is not None:
                self._learner.drop(place)

        return self.call("drop a microbatch", drop)


class TrainingParts:
    """By replica, in order. Used on the loop."""

    def __init__(self, replicas: Sequence[Sequence[TrainingPart]]) -> None:
        self.replicas = tuple(tuple(replica) for replica in replicas)
        segments = [part.segment for part in self.replicas[0]]
        self.segment: Segment = segments[0] if len(segments) == 1 else SplitSegment(segments)
        self._step = (b"", -1)  # run and step, of which are
        self._replica_of: dict[int, int] = {}  # by a microbatch's index
        self._in_flight: dict[int, int] = {}  # replicas, by place

    def __repr__(self) -> str:
        return f"<TrainingParts {[list(replica) for replica in self.replicas]}>"

    def __iter__(self) -> Iterator[TrainingPart]:
        return (part for replica in self.replicas for part in replica)

    def __len__(self) -> int:
        return sum(map(len, self.replicas))

    @property
    def span(self) -> Span:
        """All units."""
        return Span(self.segment.start, self.segment.end)

    @property
    def bench(self) -> Executor:
        """Where what concerns them all is done."""
        return self.replicas[0][0].executor

    @property
    def ledger(self) -> MemoryLedger:
        """Of the first device, on which replicas among the peers are averaged."""
        return self.replicas[0][0].memory.ledger

    @property
    def unit_s(self) -> float:
        """Seconds for a microbatch through one unit, there and back, where microbatches follow one another: the slowest device
        decides, and replicas add up. 0 before anything was timed."""
        slowest_s = [max(part.span.units * part.unit_time.unit_s for part in replica) for replica in self.replicas]
        timed = [pass_s for pass_s in slowest_s if pass_s]
        return 1 / (self.span.units * sum(1 / pass_s for pass_s in timed)) if timed else 0.0

    @property
    def window(self) -> int:
        """Microbatches that have room at once; 0 where nothing is known of their size."""
        windows = [min(part.memory.window for part in replica) for replica in self.replicas]
        return min(MAX_IN_FLIGHT, sum(windows)) if all(windows) else 0

    async def begin(self, run: Run, step: int) -> DeviceLearners:
        """New learners for a run, which are not ready yet."""
        held: set[int] = set()
        learners = []
        for part in self:
            learners.append(await part.begin(run, step, follows=held & part.blocks, alone=len(self) == 1))
            held |= part.blocks
        return DeviceLearners(learners, self.segment)

    async def refound(self) -> None:
        """Everything as the swarm was founded with it. Raises CheckpointError, LocalError."""
        for part in self:
            await part.refound()

    # -- microbatches

    def admit(self, body: Forward, place: int) -> bool:
        """Whether there is room for a microbatch, on all devices that it passes; it has it then, until it is `ended`."""
        replica = self._choose(body)
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
        """The parts that an admitted microbatch passes, in order, and the units of each."""
        hop = body.route[body.hop]
        parts = self.replicas[self._in_flight[place]]
        spans = [Span(max(hop.start, part.span.start), min(hop.end, part.span.end)) for part in parts]
        return [(part, span) for part, span in zip(parts, spans, strict=True) if span.units > 0]

    def ended(self, place: int) -> None:
        """A microbatch keeps nothing any more. Safe to call twice."""
        replica = self._in_flight.pop(place, None)
        for part in () if replica is None else self.replicas[replica]:
            part.memory.ended(place)

    def _choose(self, body: Forward) -> int:
        """The replica that has had this index in this step, else the one that has least in flight for its speed."""
        step = body.run, body.step
        if step != self._step:
            self._step, self._replica_of = step, {}
        chosen = self._replica_of.get(body.number)
        return min(range(len(self.replicas)), key=self._load) if chosen is None else chosen

    def _load(self, replica: int) -> float:
        slowest_s = max(part.span.units * part.unit_time.unit_s for part in self.replicas[replica])
        return (1 + list(self._in_flight.values()).count(replica)) * (slowest_s or 1.0)

    # -- memory

    def average(self, run: Run) -> None:
        """This node has replicas among the peers: what they agree on is computed on the first device."""
        first, *others = self.replicas[0]
        gradient_bytes = sum(part.memory.gradient_bytes for part in (first, *others))
        copies = any(part.segment.device != first.segment.device for part in others)
        first.memory.average(run, gradient_bytes, copies=int(copies))

    def close(self) -> None:
        """Nothing is trained here any more."""
        for part in self:
            part.memory.close()
