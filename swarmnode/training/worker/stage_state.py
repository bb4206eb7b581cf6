"""Stage state: run and step of a stage, the ways in which it gets to another step, and the steps that a listener has missed.

Shared state changes on the loop without an await in between; the learner's tensors live on the executor.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from swarmnode.checkpoints.checkpoint_manager import CheckpointManager
from swarmnode.codec.averaging_messages import Group, How, Reduce
from swarmnode.codec.training_messages import Commit, Condition, Status
from swarmnode.compute.executor import Urgency
from swarmnode.compute.training.device_learners import DeviceLearners
from swarmnode.compute.training.segment import Segment
from swarmnode.errors import LocalError, ProtocolError
from swarmnode.ledger import Account, Full, MemoryLedger, Reservation
from swarmnode.net.interfaces import PeerId
from swarmnode.swarm.records.run import Run, encode_run
from swarmnode.training.averaging.all_reduce import Agreed
from swarmnode.training.worker.status import counted_of
from swarmnode.training.worker.training_parts import TrainingParts

log = logging.getLogger(__name__)
T = TypeVar("T")

DEPARTURE = 1.25  # factor between the speed that was told and the one that is measured
MAX_MISSED = 16  # steps that a listener makes up for
MEET_S = 5.0  # for a step that replicas are to write down together to come


def check_positions(segment: Segment, run: Run) -> None:
    """Raises ProtocolError where a run's samples are longer than the model's positions."""
    if segment.positions is not None and run.sequence > segment.positions:
        raise ProtocolError(f"samples of {run.sequence} tokens, but the model has {segment.positions} positions")


@dataclass(frozen=True)
class MissedStep:
    """The update that ends `step`; `norm` is the gradient's, of the whole model."""

    step: int
    agreed: Agreed
    norm: float
    memory: Reservation


class MissedSteps:
    """What replicas agreed on while a listener fetches its state, until it can make up for it; the oldest first.

    Each is as long as the gradients: they are in the ledger, and few. If there is no room for one more the oldest go: a state that
    was fetched after them is a beginning too, and one from before them is fetched anew.
    """

    def __init__(self, ledger: MemoryLedger) -> None:
        self._ledger = ledger
        self._steps: deque[MissedStep] = deque()
        self._forgotten_until = 0  # steps before this one went by, and are not here

    def __repr__(self) -> str:
        return f"<MissedSteps {[missed.step for missed in self._steps]}>"

    def __len__(self) -> int:
        return len(self._steps)

    def clear(self) -> None:
        """Listen anew."""
        while self._steps:
            self._steps.popleft().memory.release()
        self._forgotten_until = 0

    def keep(self, step: int, agreed: Agreed, norm: float) -> None:
        """One more step went by."""
        while len(self._steps) >= MAX_MISSED:
            self._forget_oldest()
        while True:
            try:
                memory = self._ledger.reserve(Account.AVERAGING, agreed.size_bytes)
                break
            except Full:
                if not self._steps:
                    self._forgotten_until = step + 1
                    return
                self._forget_oldest()
        self._steps.append(MissedStep(step, agreed, norm, memory))

    def take(self, step: int) -> MissedStep | None:
        """The update that ends `step`, where it went by; its memory is the caller's to give back. Raises LocalError where it was
        forgotten."""
        while self._steps and self._steps[0].step < step:
            self._steps.popleft().memory.release()
        if step < self._forgotten_until or (self._steps and self._steps[0].step > step):
            raise LocalError(f"there was no room for what was agreed on at step {step}: a later state is to be fetched")
        return self._steps.popleft() if self._steps else None

    def _forget_oldest(self) -> None:
        oldest = self._steps.popleft()
        oldest.memory.release()
        self._forgotten_until = oldest.step + 1


class StageState:
    """`agreed` is what the replicas agreed on at `step`, if they have; `replicas` who has taken part in that in this run, by
    block; `last` the norm and loss of the step before."""

    def __init__(self, parts: TrainingParts, checkpoint_manager: CheckpointManager) -> None:
        self.step = 0
        self.condition = Condition.BLANK
        self.run: Run | None = None
        self.agreed: Agreed | None = None
        self.replicas: dict[int, set[PeerId]] = {}
        self.losses: dict[int, float] = {}  # of what the model's last unit has counted, by microbatch
        self.last = (0.0, 0.0)
        self._is_founding = True  # parameters are those that the swarm was founded with
        self._founded = False  # the run was begun with these
        self._told_unit_s = 0.0
        self._update: asyncio.Future[None] | None = None  # the last one, which may be under way
        self._parts = parts
        self._checkpoint_manager = checkpoint_manager
        self._executor = parts.bench
        self._learner: DeviceLearners | None = None
        self._missed = MissedSteps(parts.ledger)
        self._meetings: dict[int, asyncio.Future[None]] = {}  # steps to be written down when they come

    def __repr__(self) -> str:
        return f"<StageState {self.condition.name} at step {self.step}, {self._missed!r}>"

    def agree(self, agreed: Agreed, groups: Iterable[Group]) -> None:
        """The replicas of each group have agreed."""
        self.agreed = agreed
        for group in groups:
            if group.how != How.APART:
                for block in group.blocks:
                    self.replicas.setdefault(block, set()).update(member.peer for member in group.members)

    @property
    def run_id(self) -> bytes:
        """Empty before a run has begun."""
        return b"" if self.run is None else self.run.id

    @property
    def learnt_step(self) -> int:
        """The step of which the state is here; 0 where nothing was learnt yet, or what was is still being fetched."""
        return self.step if self.condition == Condition.READY else 0

    @property
    def is_as_founded(self) -> bool:
        """Whether there is nothing here that whoever comes has not, too: step 0 of the first run."""
        return self.step == 0 and self._is_founding

    @property
    def learner(self) -> DeviceLearners:
        """Raises LocalError before a run has begun."""
        if self._learner is None:
            raise LocalError("no training has begun here")
        return self._learner

    @property
    def masks(self) -> dict[int, int]:
        """What is counted, by unit; on the executor."""
        return {} if self._learner is None else dict(self._learner.counted)

    def status(self, term: int, kind: int, slowest_link_s: float) -> Status:
        """What answers a command of this kind; on the executor, where the masks are."""
        kept, masks, segment = self._checkpoint_manager, self.masks, self._parts.segment
        last = masks.get(segment.units - 1, 0)
        losses = tuple(self.losses.get(number, 0.0) for number in range(last.bit_length()) if last >> number & 1)
        run = self.run or kept.run
        norm, loss = self.last
        self._told_unit_s = unit_s = self._parts.unit_s
        return Status(
            term,
            self.condition,
            segment.start,
            segment.end,
            b"" if run is None else encode_run(run),
            self.step,
            counted_of(masks),
            kept.kept(),
            self.agreed is not None,
            losses,
            norm,
            loss,
            kind,
            unit_s,
            self._parts.window,
            slowest_link_s,
            self._founded,
        )

    def has_new_speed(self) -> bool:
        """Whether the coordinator was told of one that is not so any more, as where it was estimated; once."""
        unit_s, told_s = self._parts.unit_s, self._told_unit_s
        if not unit_s or 1 / DEPARTURE <= told_s / unit_s <= DEPARTURE:
            return False
        self._told_unit_s = unit_s
        return True

    async def counts_less(self, body: Reduce, peer: PeerId) -> bool:
        """Whether a REDUCE has this peer contribute more microbatches than are counted here: word that they are lost came to the
        coordinator before a trainer's that they are done. Raises LocalError before a run has begun."""
        learner = self.learner

        def is_less(group: Group, count: int) -> bool:
            least = int(group.how == How.AVERAGE)  # who counted nothing still says how far it came
            held = (block for block in group.blocks if block in learner.blocks)
            return any(max(least, learner.count_of(block)) < count for block in held)

        told = [(group, member.count) for group in body.groups for member in group.members if member.peer == peer]
        return await self._call("compare counts", lambda: any(is_less(group, count) for group, count in told))

    # -- ways to a step

    async def begin(self, run: Run) -> None:
        """Step 0 of a run, with the parameters as they are."""
        await self._take_up(run, 0)
        self._founded = self._is_founding
        if not self._founded:
            await self.save()  # a joiner must find step 0 here
        self.condition = Condition.READY

    async def restore(self, run: Run, step: int) -> None:
        """A step on the disk; step 0 of a first run is what the swarm was founded with. Raises CheckpointError, LocalError."""
        self._checkpoint_manager.open(run)
        if step == 0 and step not in self._checkpoint_manager.kept():
            await self._begin_anew(run)
            return
        learner = await self._take_up(run, step)
        await self._load(learner, step)
        self.condition = Condition.READY

    async def _begin_anew(self, run: Run) -> None:
        self.condition = Condition.BLANK
        if not self._is_founding:
            await self._parts.refound()
            self._is_founding = True
        await self.begin(run)

    async def sync(self, run: Run, step: int, peers: Sequence[PeerId]) -> None:
        """Fetch a state of `step` or later while the all-reduces are heard, then catch up. Raises PeerRefused, LocalError."""
        self._missed.clear()
        learner = await self._take_up(run, step)
        self.condition = Condition.LISTENING
        fetched = await self._checkpoint_manager.fetch(lambda: peers, learner.blocks, at_least=step)
        await self._load(learner, fetched)
        self.step = fetched
        while (missed := self._missed.take(self.step)) is not None:
            with missed.memory:
                await self._call("update", partial(missed.agreed.commit, learner, missed.norm))
            self.step += 1
        self.condition = Condition.READY

    async def _load(self, learner: DeviceLearners, step: int) -> None:
        self._is_founding = False
        await self._call("load a checkpoint", lambda: self._checkpoint_manager.load(learner, step))

    async def _take_up(self, run: Run, step: int) -> DeviceLearners:
        """A new learner, which is not ready yet. Raises ProtocolError where the model has no such positions."""
        check_positions(self._parts.segment, run)
        self.condition = Condition.BLANK
        self._checkpoint_manager.open(run)
        self._checkpoint_manager.give(self._fresh)
        self.run, self.step, self.agreed, self.losses, self.replicas = run, step, None, {}, {}
        self._founded = False
        self._learner = await self._parts.begin(run, step)
        return self._learner

    # -- the end of a step

    def misses(self, body: Commit) -> bool:
        """Whether a step ends that a listener makes up for when it has its state."""
        if self.condition != Condition.LISTENING or self.agreed is None or body.run != self.run_id:
            return False
        agreed, self.agreed = self.agreed, None
        self._missed.keep(body.step, agreed, body.norm)
        return True

    def commit(self, body: Commit) -> asyncio.Future[None] | None:
        """Go to the next step by what was agreed on: the update under way. None where that is not what is to be done here."""
        agreed, self.agreed = self.agreed, None
        if agreed is None or body.step != self.step or body.run != self.run_id:
            return None
        learner = self.learner
        self.step, self.last, self.losses = body.step + 1, (body.norm, body.loss), {}
        self._is_founding = False
        self._update = done = self._call("update", lambda: agreed.commit(learner, body.norm))
        meeting = self._meetings.pop(self.step, None)
        if meeting is not None and not meeting.done():
            meeting.set_result(None)
        return done

    async def updated(self) -> None:
        """Wait for the update that ends the step before, if one is under way; what becomes of it others look at."""
        if self._update is not None:
            await asyncio.wait([self._update])

    # -- what is written down

    @property
    def is_due(self) -> bool:
        """Whether all peers write this step down."""
        return self.run is not None and (self.step % self.run.checkpoint_steps == 0 or self.step == self.run.steps)

    async def save(self) -> None:
        """Write the step down. A full disk costs the step, not the training: earlier ones stay."""
        learner = self.learner
        try:
            await self._checkpoint_manager.save(learner, self._executor)
        except LocalError as error:
            log.warning("%s", error)

    async def _fresh(self, at_least: int) -> int:
        """Write down the step that this stage is at, for who asks; the one that is asked for where that comes soon: so replicas
        that go on meanwhile all write the same one. Raises LocalError."""
        if self.condition != Condition.READY:
            raise LocalError("this stage is behind itself")
        if self.step < at_least:
            meeting = self._meetings.setdefault(at_least, asyncio.get_running_loop().create_future())
            await asyncio.wait([meeting], timeout=MEET_S)
            self._meetings.pop(at_least, None)
        if self.is_as_founded:
            raise LocalError("nothing is learnt here yet that others would not have")
        return await self._checkpoint_manager.save(self.learner, self._executor)

    def _call(self, kind: str, function: Callable[[], T]) -> asyncio.Future[T]:
        return self._executor.call(Urgency.CONTROL, function, kind=kind, owner=f"step {self.step}")
