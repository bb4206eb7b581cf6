"""Stage state: run and step of a stage, its ways to another step, and the steps that a listener has missed.

Shared state changes on the event loop without an await in between; the learner's tensors live on the executor.

Masks of counted microbatches as a STATUS carries them: runs of layers with the same mask.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TypeVar

from swarmnode.checkpoints.checkpoint_manager import CheckpointManager
from swarmnode.codec.training_messages import Commit, Condition, Counted, Group, How, Reduce, Status, packed_mask
from swarmnode.compute.executor import Urgency
from swarmnode.compute.training.device_learners import DeviceLearners
from swarmnode.compute.training.segment import Segment
from swarmnode.errors import CheckpointError, LocalError, ProtocolError
from swarmnode.ledger import Account, Full, MemoryLedger, Reservation
from swarmnode.net.interfaces import PeerId
from swarmnode.swarm.records.run import Run, encode_run
from swarmnode.training.averaging.all_reduce import Agreed
from swarmnode.training.worker.training_parts import TrainingParts


def counted_of(masks: Mapping[int, int]) -> tuple[Counted, ...]:
    """Return the masks by layer as runs of adjoining layers; layers with an empty mask are left out."""
    runs: list[Counted] = []
    for _, run in groupby(sorted(masks.items()), key=lambda item: (item[1], item[0] - sorted(masks).index(item[0]))):
        units = list(run)
        mask = units[0][1]
        if mask:
            runs.append(Counted(units[0][0], units[-1][0] + 1, packed_mask(mask)))
    return tuple(runs)


def masks_of(counted: Iterable[Counted], everything: int) -> dict[int, int]:
    """Return the masks by layer. Raises ProtocolError if one contains a microbatch that is not in `everything`."""
    masks: dict[int, int] = {}
    for entry in counted:
        mask = int.from_bytes(entry.mask, "little")
        if mask & ~everything:
            raise ProtocolError("it reports microbatches that the step does not have")
        masks.update(dict.fromkeys(range(entry.start, entry.end), mask))
    return masks


log = logging.getLogger(__name__)
T = TypeVar("T")

DEPARTURE = 1.25  # factor between the reported and the measured speed
MAX_MISSED = 16  # steps that a listener catches up with
MEET_S = 5.0  # wait for a step that replicas are to write down together


def check_positions(segment: Segment, run: Run) -> None:
    """Raise ProtocolError if the run's samples are longer than the model's positions."""
    if segment.positions is not None and run.sequence > segment.positions:
        raise ProtocolError(f"samples of {run.sequence} tokens, but the model has {segment.positions} positions")


@dataclass(frozen=True)
class MissedStep:
    """The update that ends `step`; `norm` is the gradient norm of the whole model."""

    step: int
    agreed: Agreed
    norm: float
    memory: Reservation


class MissedSteps:
    """The updates that replicas agreed on while a listener fetches its state, oldest first.

    Each is as long as the gradients, so they are counted in the ledger, and few. If there is no room for another one, the
    oldest are forgotten: a state that is fetched after them is still a beginning, and an older one must be fetched again.
    """

    def __init__(self, ledger: MemoryLedger) -> None:
        self._ledger = ledger
        self._steps: deque[MissedStep] = deque()
        self._forgotten_until = 0  # earlier steps have passed and are not here

    def __len__(self) -> int:
        return len(self._steps)

    def clear(self) -> None:
        """Forget all updates that were kept while the stage catches up, and release their memory."""
        while self._steps:
            self._steps.popleft().memory.release()
        self._forgotten_until = 0

    def store_step(self, step: int, agreed: Agreed, norm: float) -> None:
        """Add the update of one more step. Forgets the oldest ones, or this one, if there is no room."""
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

    def pop_step(self, step: int) -> MissedStep | None:
        """Remove and return the update that ends `step`; None if it has not arrived. The caller must release its memory. Raises
        LocalError if it was forgotten."""
        while self._steps and self._steps[0].step < step:
            self._steps.popleft().memory.release()
        if step < self._forgotten_until or (self._steps and self._steps[0].step > step):
            raise LocalError(f"there was no room for the update of step {step}; fetch a later state")
        return self._steps.popleft() if self._steps else None

    def _forget_oldest(self) -> None:
        oldest = self._steps.popleft()
        oldest.memory.release()
        self._forgotten_until = oldest.step + 1


class StageState:
    """Run and step of a stage. `agreed` is the replicas' agreement at `step`, if there is one; `replicas` the peers that
    took part in agreements of this run, by block; `last` the norm and loss of the previous step."""

    def __init__(self, parts: TrainingParts, checkpoint_manager: CheckpointManager) -> None:
        self.step = 0
        self.condition = Condition.BLANK
        self.run: Run | None = None
        self.agreed: Agreed | None = None
        self.replicas: dict[int, set[PeerId]] = {}
        self.losses: dict[int, float] = {}  # of the counted microbatches, if this stage has the model's last unit
        self.last = (0.0, 0.0)
        self._is_founding = True  # the parameters are the founder's
        self._founded = False  # the run was begun with the founder's parameters
        self._reported_unit_s = 0.0
        self._moves = 0  # to a run or step, under way
        self._update: asyncio.Future[None] | None = None  # the last one, perhaps under way
        self._parts = parts
        self._checkpoint_manager = checkpoint_manager
        self._executor = parts.shared_executor
        self._learner: DeviceLearners | None = None
        self._missed = MissedSteps(parts.ledger)
        self._meetings: dict[int, asyncio.Future[None]] = {}  # steps to be written down when they come

    def agree(self, agreed: Agreed, groups: Iterable[Group]) -> None:
        """Record the result of an all-reduce, and for each block the replicas that took part."""
        self.agreed = agreed
        for group in groups:
            if group.how != How.APART:
                for block in group.blocks:
                    self.replicas.setdefault(block, set()).update(member.peer for member in group.members)

    @property
    def run_id(self) -> bytes:
        """Id of the run; empty before a run has begun."""
        return b"" if self.run is None else self.run.id

    @property
    def learnt_step(self) -> int:
        """The step whose state is here; 0 if nothing is learnt yet or the state is still being fetched."""
        return self.step if self.condition == Condition.READY else 0

    @property
    def is_stateless(self) -> bool:
        """Whether the stage has no state and is on the way to none."""
        return self.condition != Condition.READY and not self._moves

    @property
    def is_as_founded(self) -> bool:
        """Whether the state is step 0 of the first run, which every newcomer has too."""
        return self.step == 0 and self._is_founding

    @property
    def learner(self) -> DeviceLearners:
        """Learners of this node's devices in the present training run. Raises LocalError before a run has begun."""
        if self._learner is None:
            raise LocalError("no training has begun here; begin one with `swarmnode train`")
        return self._learner

    @property
    def masks(self) -> dict[int, int]:
        """Masks of the counted microbatches, by layer. Must run on the executor."""
        return {} if self._learner is None else dict(self._learner.counted)

    def status(self, term: int, kind: int, slowest_link_s: float) -> Status:
        """Return the STATUS that answers a command of this kind. Must run on the executor, which has the masks."""
        manager, masks, segment = self._checkpoint_manager, self.masks, self._parts.segment
        last = masks.get(segment.units - 1, 0)
        losses = tuple(self.losses.get(number, 0.0) for number in range(last.bit_length()) if last >> number & 1)
        run = manager.run or self.run  # that of the stored steps
        norm, loss = self.last
        self._reported_unit_s = unit_s = self._parts.unit_s
        return Status(
            term,
            self.condition,
            segment.start,
            segment.end,
            b"" if run is None else encode_run(run),
            self.step,
            counted_of(masks),
            manager.stored_steps(),
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
        """Return whether the speed differs from the reported one by more than DEPARTURE, and take it as reported."""
        unit_s, told_s = self._parts.unit_s, self._reported_unit_s
        if not unit_s or 1 / DEPARTURE <= told_s / unit_s <= DEPARTURE:
            return False
        self._reported_unit_s = unit_s
        return True

    async def counts_less(self, body: Reduce, peer: PeerId) -> bool:
        """Return whether a REDUCE expects more microbatches of this peer than it has counted. That happens if the coordinator hears
        that they are lost before it hears from a trainer that they are done. Raises LocalError before a run has begun."""
        learner = self.learner

        def is_less(group: Group, count: int) -> bool:
            least = int(group.how == How.AVERAGE)  # a member that counted nothing still reports its parameters
            held = (block for block in group.blocks if block in learner.blocks)
            return any(max(least, learner.count_of(block)) < count for block in held)

        told = [(group, member.count) for group in body.groups for member in group.members if member.peer == peer]
        return await self._call("compare counts", lambda: any(is_less(group, count) for group, count in told))

    # -- ways to a step

    @contextlib.contextmanager
    def _moving(self) -> Iterator[None]:
        """Return a context of a move to a run or step. A `CheckpointManager.restore` for a stateless stage must not change the run
        meanwhile: the move would write its steps into the other run's folder, or load them from there."""
        self._moves += 1
        try:
            yield
        finally:
            self._moves -= 1

    async def begin(self, run: Run) -> None:
        """Begin the training run at step 0, with the parameters that the stage has now."""
        with self._moving():
            await self._create_learner(run, 0)
            self._founded = self._is_founding
            if not self._founded:
                await self.save()  # newcomers must find step 0 here
            self.condition = Condition.READY

    async def restore(self, run: Run, step: int) -> None:
        """Load a step from the disk; step 0 of a first run has the founder's parameters. Raises CheckpointError, LocalError."""
        with self._moving():
            self._checkpoint_manager.open(run)
            if step == 0 and step not in self._checkpoint_manager.stored_steps():
                self.condition = Condition.BLANK
                if not self._is_founding:
                    await self._parts.refound()
                    self._is_founding = True
                await self.begin(run)
                return
            learner = await self._create_learner(run, step)
            await self._load(learner, step)
            self.condition = Condition.READY

    async def sync(self, run: Run, step: int, peers: Sequence[PeerId]) -> None:
        """Fetch a state of `step` or later while listening to the all-reduces, then catch up. Raises PeerRefused, LocalError, and
        ProtocolError, which names the holders, if the state does not fit the layers or holds NaN."""
        with self._moving():
            self._missed.clear()
            learner = await self._create_learner(run, step)
            self.condition = Condition.LISTENING
            fetched = await self._checkpoint_manager.fetch(lambda: peers, learner.blocks, at_least=step)
            try:
                await self._load(learner, fetched)
            except CheckpointError as error:
                self._checkpoint_manager.set_aside(fetched)
                raise ProtocolError(f"the state that {', '.join(peers)} gave: {error}") from error
            self.step = fetched
            while (missed := self._missed.pop_step(self.step)) is not None:
                with missed.memory:
                    await self._call("update", partial(missed.agreed.commit, learner, missed.norm))
                self.step += 1
            self.condition = Condition.READY

    async def _load(self, learner: DeviceLearners, step: int) -> None:
        self._is_founding = False
        await self._call("load a checkpoint", lambda: self._checkpoint_manager.load(learner, step))

    async def _create_learner(self, run: Run, step: int) -> DeviceLearners:
        """Create the learner of a run; the stage is not ready yet. Raises ProtocolError if the model has too few positions."""
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
        """Return whether a COMMIT ends a step that this stage, as a listener, catches up with later; keep the step's update
        in that case."""
        if self.condition != Condition.LISTENING or self.agreed is None or body.run != self.run_id:
            return False
        agreed, self.agreed = self.agreed, None
        self._missed.store_step(body.step, agreed, body.norm)
        return True

    def commit(self, body: Commit) -> asyncio.Future[None] | None:
        """Start the update that was agreed on and go to the next step. Returns the update under way, or None if the COMMIT
        does not fit the state."""
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
        """Wait for the update under way, if there is one. Ignores its errors, which are handled elsewhere."""
        if self._update is not None:
            await asyncio.wait([self._update])

    # writing to the disk

    @property
    def is_due(self) -> bool:
        """Whether the current step is one that all stages write to their disks."""
        return self.run is not None and self.run.is_checkpoint(self.step)

    async def save(self) -> None:
        """Write the step to the disk. If the disk is full, the step is not kept, but earlier ones are, and training goes on."""
        learner = self.learner
        try:
            await self._checkpoint_manager.save(learner, self._executor)
        except LocalError as error:
            log.warning("%s", error)

    async def _fresh(self, at_least: int) -> int:
        """Write the current step to the disk for a peer and return it. Waits at most MEET_S for the step `at_least`, so that all
        replicas write the same one. Raises LocalError if the stage is not ready or has learnt nothing."""
        if self.condition != Condition.READY:
            raise LocalError("this node is still catching up with the training; try again soon")
        if self.step < at_least:
            meeting = self._meetings.setdefault(at_least, asyncio.get_running_loop().create_future())
            await asyncio.wait([meeting], timeout=MEET_S)
            self._meetings.pop(at_least, None)
        if self.is_as_founded:
            raise LocalError("this node has not finished a step of training yet; try again soon")
        return await self._checkpoint_manager.save(self.learner, self._executor)

    def _call(self, kind: str, function: Callable[[], T]) -> asyncio.Future[T]:
        return self._executor.call(Urgency.CONTROL, function, kind=kind, owner=f"step {self.step}")
