"""Worker handle: a stage as the coordinator sees it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Union

from swarmnode.codec.messages import Body
from swarmnode.codec.training_messages import Begin, Condition, Discard, Lead, Restore, Status, Sync
from swarmnode.net.interfaces import PeerId
from swarmnode.net.links.switchboard import Channel
from swarmnode.plan.training.recovery import HoldingReport
from swarmnode.plan.training.wiring import Replica
from swarmnode.plan.view import Span
from swarmnode.roles.training.coordinator.loopback import Loopback
from swarmnode.swarm.records.run import decode_run

Line = Union[Channel, Loopback]


class WorkerState(Enum):
    """What may be asked of a member."""

    ASKED = "asked"  # has not said yet what it holds
    COMING = "coming"  # on its way to the step in force, within moments
    DISCARDING = "discarding"  # forgets what it had counted, since others counted the same
    LISTENING = "listening"  # hears the all-reduces while it fetches the state
    USABLE = "usable"


@dataclass
class WorkerHandle:
    """A stage, the line to it, and what it said last. `releases` are leases whose RELEASE it has not answered."""

    peer: PeerId
    line: Line
    state: WorkerState = WorkerState.ASKED
    status: Status | None = None
    worker: Replica = field(default_factory=lambda: Replica(Span(0, 0)))
    releases: deque[int] = field(default_factory=deque)
    listens_from: int = 0  # the first step whose all-reduce it hears

    @property
    def span(self) -> Span:
        return self.worker.span

    @property
    def has_begun(self) -> bool:
        """Whether it is in a run, or has steps of one on its disk."""
        status = self.status
        return status is not None and bool(status.run) and (status.condition != Condition.BLANK or bool(status.kept))

    def send(self, body: Body) -> None:
        """Tell it something; where the line is cut, its loss is about to be heard of."""
        if self.line.open:
            self.line.send(body)

    def hear(self, status: Status) -> None:
        """Take in what it says of itself. Raises ProtocolError where the run that it is in is none: it breaks its own line by that,
        and not the coordinator, which would go on from it."""
        if status.run:
            decode_run(status.run)
        self.status = status
        self.worker.span = Span(status.start, status.end)
        self.worker.unit_s = status.unit_s
        self.worker.room = status.in_flight

    def hears(self, step: int) -> bool:
        """Whether it hears the all-reduce of a step."""
        listens = self.state is WorkerState.LISTENING and self.listens_from <= step
        return listens or self.state is WorkerState.USABLE

    def ask(self, term: int) -> None:
        """Have it say what it holds."""
        self.state, self.status = WorkerState.ASKED, None
        self.send(Lead(term))

    def begin(self, run: bytes) -> None:
        """Have it come to step 0 of a run."""
        self.state = WorkerState.COMING
        self.send(Begin(run))

    def restore(self, run: bytes, step: int) -> None:
        """Have it come to a step that it has on its disk."""
        self.state = WorkerState.COMING
        self.send(Restore(run, step))

    def sync(self, run: bytes, step: int, holders: tuple[PeerId, ...]) -> None:
        """Have it hear the all-reduces from `step` on, and fetch the state from the holders."""
        self.state, self.listens_from = WorkerState.LISTENING, step
        self.send(Sync(run, step, holders))

    def discard(self) -> None:
        """Have it forget what it has counted in this step."""
        self.state = WorkerState.DISCARDING
        self.send(Discard())

    def report(self, run: bytes, *, fresh: bool) -> HoldingReport:
        """Its place in a run, for the recovery plan. `fresh`: nobody has begun it, so that the founding parameters are step 0."""
        status = self.status
        assert status is not None
        begun = status.run == run and status.condition == Condition.READY
        kept = frozenset(status.kept) if status.run == run else frozenset()
        return HoldingReport(self.span, status.step if begun else 0, begun or fresh, begun and status.reduced, kept)
