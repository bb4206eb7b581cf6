"""What one device holds of the units that a node trains: its thread, its memory, and the learner of the run in force."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import TypeVar

from swarmnode.codec.body import SHARED
from swarmnode.compute.executor import Executor, Urgency
from swarmnode.compute.stopwatch import Stopwatch
from swarmnode.compute.training.learner import Learner
from swarmnode.compute.training.segment import Segment, refound
from swarmnode.errors import LocalError
from swarmnode.ledger import Account, MemoryLedger
from swarmnode.plan.view import Span
from swarmnode.roles.training.worker.memory import TrainingMemory
from swarmnode.roles.training.worker.pass_estimator import PassEstimator
from swarmnode.roles.training.worker.unit_time import UnitTime
from swarmnode.swarm.records.run import Run

T = TypeVar("T")
LoadUnits = Callable[[int, int], Segment]
"""(start, end): these units as the swarm was founded with them. Raises CheckpointError, LocalError."""


class TrainingPart:
    """Used on the loop, but for the learner."""

    def __init__(
        self,
        segment: Segment,
        executor: Executor,
        *,
        memory: TrainingMemory | None = None,
        stopwatch: Stopwatch | None = None,
        estimator: PassEstimator | None = None,
        load: LoadUnits | None = None,
    ) -> None:
        self.segment = segment
        self.executor = executor
        self.memory = memory or TrainingMemory(MemoryLedger(), segment)
        self.stopwatch = stopwatch or Stopwatch(segment.device)
        self.unit_time = UnitTime()
        self._estimator = estimator
        self._load = load
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
        if self._load is None:
            raise LocalError("nothing is known here of what the swarm was founded with")
        held = self.segment.parameters()
        for unit in range(self.segment.start, self.segment.end):
            tensors = (tensor for block in (unit, SHARED) for tensor in held.get(block, {}).values())
            with self.memory.ledger.reserve(Account.CHECKPOINTS, sum(tensor.nbytes for tensor in tensors)):
                refound(self.segment, self._load(unit, unit + 1))

    def _estimate(self, learner: Learner) -> None:
        self.unit_time.begin(0.0 if self._estimator is None else self._estimator.unit_s(learner))

    def call(self, kind: str, function: Callable[[], T], *, owner: str = "") -> asyncio.Future[T]:
        """Something between passes, on its thread."""
        return self.executor.call(Urgency.CONTROL, function, kind=kind, owner=owner)

    def drop(self, place: int) -> asyncio.Future[None]:
        """Forget a microbatch that will not come back, behind what the device computes for it still."""

        def drop() -> None:
            if self._learner is not None:
                self._learner.drop(place)

        return self.call("drop a microbatch", drop)
