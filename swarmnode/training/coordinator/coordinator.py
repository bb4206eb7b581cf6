"""Coordinator: it assigns a step's microbatches, sees that each is counted once, and orders the all-reduce and the commit.

Any ready node can lead; the eldest does. A coordinator knows only the reports of stages and trainers, so if it is lost the
next one asks them again and goes on. A term numbers the coordinators: stages follow the highest term that they know.

The state machine of `plan/training/coordination.py` holds the phase and the actions after each event. Each message and each
tick of the clock updates the coordinator's knowledge and then calls `_advance`, which looks for events that have come
about; nothing here waits.

Rendezvous: it finds the step to go on from, given the holdings that all stages report.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from swarmnode import tolerances
from swarmnode.codec.body import Body
from swarmnode.codec.frames import FrameKind
from swarmnode.codec.messages import End, Error
from swarmnode.codec.training_messages import KEY_BYTES, MAX_LEFT_OUT, Done, Failed, ProgressReport, Status, Wait, Work
from swarmnode.decisions import Topic
from swarmnode.errors import ErrorCode, ProtocolError
from swarmnode.links.switchboard import Channel
from swarmnode.net.interfaces import PeerId
from swarmnode.net.tasks import Tasks
from swarmnode.plan.training.coordination import (
    Action,
    Coordination,
    Event,
    Phase,
    RecoveryPlan,
    plan_anew,
    plan_recovery,
)
from swarmnode.swarm.records.run import Run, decode_run, encode_run
from swarmnode.training.coordinator.averaging_groups import AveragingGroups
from swarmnode.training.coordinator.dispatcher import Dispatcher, TrainerConnections, TrainerLine
from swarmnode.training.coordinator.link_times import SAVE_S
from swarmnode.training.coordinator.step_loop import CoordinatorResources, StepLoop
from swarmnode.training.coordinator.worker_group import (
    MAX_TERM_JUMP,
    WorkerGroup,
    WorkerHandle,
    WorkerState,
    longest_waits,
)

ANSWERS_S = 3.0
ANEW_AFTER_S = 60.0  # before a first run that nothing is left of begins anew: a holder may only be away
ROLL_BACK_AFTER_S = 3.0  # before steps on disk count while units are missing: a peer may only have been slow


class Rendezvous:
    """A rendezvous of the stages. It goes on until they together hold all `units`; `missing` are the layers without a holder."""

    def __init__(self, units: int, clock: Callable[[], float]) -> None:
        self.missing: tuple[int, ...] = ()
        self._units = units
        self._clock = clock
        self._began_s = clock()
        self._missing_since_s: float | None = None

    @property
    def waited(self) -> bool:
        """Whether ANSWERS_S have passed: stages that have not answered are not waited for if the others hold all layers."""
        return self._clock() - self._began_s >= ANSWERS_S

    def find(self, members: Iterable[WorkerHandle], run: Run) -> RecoveryPlan | None:
        """Return the step to go on from and each member's way there; None while layers are missing. All `members` must have
        answered."""
        members = list(members)
        fresh = all(member.is_as_founded for member in members)
        reports = {member.peer: member.report(encode_run(run), fresh=fresh) for member in members}
        now_s = self._clock()
        waited_s = 0.0 if self._missing_since_s is None else now_s - self._missing_since_s
        alone = not any(report.ready for report in reports.values())
        found = plan_recovery(self._units, reports, roll_back=alone or waited_s >= ROLL_BACK_AFTER_S)
        if found.missing and waited_s >= ANEW_AFTER_S:
            found = plan_anew(self._units, reports, stored_from=run.checkpoint_steps) or found
        self.missing = found.missing
        if not found.missing:
            return found
        self._missing_since_s = now_s - waited_s
        return None


def furthest_run(members: Iterable[WorkerHandle]) -> Run | None:
    """Return the run that has come furthest at any stage; None if no stage has begun one."""
    begun = [member.status for member in members if member.has_begun and member.status is not None]
    furthest = max(begun, key=lambda status: (status.condition, status.step, max(status.kept, default=0)), default=None)
    return None if furthest is None else decode_run(furthest.run)


log = logging.getLogger(__name__)

TICK_S = 0.5
OTHERS_S = 45.0  # longest delay of a first step
TELL_EVERY = 2  # ticks
TERM_BITS = 16  # of a term that make the terms of two coordinators differ


class Coordinator:
    """The coordinator of a training, while one peer is in office; each rendezvous starts a new term. `machine` is the node's own
    state machine. `resigned` is called with a term if a higher term is known, or after a crash."""

    def __init__(
        self, term: int, resources: CoordinatorResources, machine: Coordination, resigned: Callable[[int], None]
    ) -> None:
        self.term = term
        self._resources = resources
        self._machine = machine
        self._failures, self._clock = resources.failures, resources.clock
        self._resigned = resigned
        self._put_off_s: float | None = None  # since when a first step waits for other peers
        self._worker_group = WorkerGroup(
            resources.dial,
            resources.failures,
            clock=resources.clock,
            joined=lambda member: member.ask(self.term, self._dispatcher.key),
            received=self._receive,
            lost=self._lose,
        )
        self._trainer_connections = TrainerConnections()
        self._dispatcher = Dispatcher(
            resources.units,
            self._worker_group.members,
            self._trainer_connections,
            resources.failures,
            resources.link_times,
            clock=resources.clock,
        )
        self._averaging_groups = AveragingGroups(
            resources.units, resources.link_times, resources.codecs, resources.decisions
        )
        self._rendezvous = Rendezvous(resources.units, resources.clock)
        self._recovery: tuple[Run, RecoveryPlan] | None = None  # result of the rendezvous
        self._next_run: Run | None = None  # run of a trainer, to begin after the current one is over
        self._step_loop: StepLoop | None = None  # the previous loop during a rendezvous
        self._advancing = False
        self._tasks = Tasks("coordinator", on_crash=lambda _error: resigned(self.term))
        self._set_term(term)

    def start(self) -> None:
        """Start the periodic check of deadlines and events."""
        self._tasks.spawn(self._tick(), "clock")

    async def close(self) -> None:
        """Close all connections to stages and trainers; the next coordinator will ask them."""
        await self._tasks.close()
        await self._worker_group.close()
        for trainer in self._trainer_connections:
            trainer.channel.close()

    def enlist(self, peers: Iterable[PeerId]) -> None:
        """Connect to those of the stages `peers` that are not connected yet."""
        self._worker_group.enlist(peers)

    # -- clock

    async def _tick(self) -> None:
        """Apply deadlines, look for events that only time brings about, and send everyone a progress report each second."""
        for tick in itertools.count():
            await asyncio.sleep(TICK_S)
            # Dismiss the stages that are late with an answer. A stage whose replica fetches a state gets more time: it may be
            # writing the state.
            fetching = [member.span for member in self._worker_group if member.state is WorkerState.LISTENING]
            for member in self._worker_group:
                writes = any(member.span.overlaps(span) for span in fetching)
                late = member.overdue(at_least_s=SAVE_S if writes else 0.0)
                if late is not None:
                    waited_s = self._clock() - late.began_s
                    self._worker_group.dismiss(
                        member.peer, f"it has not answered {late.kind.name} within {waited_s:.1f} s"
                    )
            self._dispatcher.expire()
            self._advance()
            if tick % TELL_EVERY == 0:
                self._tell_progress()

    def _tell_progress(self) -> None:
        calling = self._machine.phase is Phase.RENDEZVOUS
        step_loop = self._step_loop
        word = ProgressReport(
            0 if step_loop is None else step_loop.step,
            0 if step_loop is None or calling else step_loop.counted,
            self._rendezvous.missing if calling else (),
            self._waits(),
            b"" if step_loop is None else step_loop.run.id,
            self._failures.banned[-MAX_LEFT_OUT:],
        )
        for member in self._worker_group:
            member.send(word)
        self._trainer_connections.tell(word)

    def _waits(self) -> tuple[Wait, ...]:
        if self._going is not None and self._going.awaits_others:
            assert self._put_off_s is not None
            return (Wait("", FrameKind.WORK, self._clock() - self._put_off_s),)
        return longest_waits(self._worker_group, self._dispatcher.ledger.out, self._failures, self._clock())

    # -- stages

    def _receive(self, member: WorkerHandle, body: Body) -> None:
        if isinstance(body, Status):
            self._receive_status(member, body)
        elif isinstance(body, Failed) and body.lease == 0 and body.code != ErrorCode.NOT_FINITE and member.asked:
            self._worker_group.dismiss(member.peer, f"it answered {member.asked[0].kind.name} with FAILED")
        elif self._going is not None:
            self._going.receive(member, body)
        self._advance()

    def _receive_status(self, member: WorkerHandle, status: Status) -> None:
        if status.term > self.term:
            # Handle a stage's report that it follows a higher term: resign, unless the stage is alone with it. A stage that
            # repeats this, or whose term is too far ahead for stages to follow, is dismissed.
            believable = status.term - self.term <= MAX_TERM_JUMP // 2
            if believable and self._failures.record(member.peer) < tolerances.FAILURES:
                self._resigned(status.term)
            else:
                self._worker_group.dismiss(member.peer, "it follows a term that no other stage has heard of")
            return
        command = member.answered(status.answers or FrameKind.COMMIT)
        if status.answers == FrameKind.RELEASE:
            if command is None:
                raise ProtocolError("it answered a RELEASE that was not sent", peer=member.peer)
        elif member.status is None and status.answers != FrameKind.LEAD:
            return  # sent before it heard our LEAD: it may have counted more since
        else:
            member.receive(status)
        if self._going is not None:
            self._going.receive(member, status)
        for lease in () if command is None else command.leases:
            record = self._dispatcher.ledger.released(lease, member.peer)
            if record is not None and self._going is not None:
                self._going.released(record)

    def _lose(self, peer: PeerId, reason: str) -> None:
        """Continue without a lost stage: forget the microbatches that it had counted."""
        step = "before the first step" if self._step_loop is None else f"in step {self._step_loop.step}"
        failed = f"it has failed {self._failures.in_a_row(peer)} times in a row"
        self._resources.decisions.record(
            Topic.TRAINING, f"goes on without {peer[-8:]}", (reason, step, failed), about=(peer,)
        )
        self._dispatcher.lose(peer)
        if self._step_loop is not None:
            self._step_loop.lose(peer)
        self._advance()

    # -- trainers

    def work(self, channel: Channel, body: Work) -> None:
        """Handle a trainer's offer of work. It is refused if the run is invalid, or if another run is in progress."""
        try:
            run = decode_run(body.run)
            self._resources.check_run(run)
        except ProtocolError:
            channel.close(Error(ErrorCode.MALFORMED))
            return
        trainer = TrainerLine(channel, run, body.want)
        if not self._accepts(trainer):
            return
        earlier = self._trainer_connections.of(channel.peer)
        if earlier is not None:  # a trainer that asks again starts anew: else one peer could be a thousand trainers
            self._lose_trainer(earlier)
        channel.on_frame = lambda _frame, body: self._receive_trainer(trainer, body)
        channel.on_lost = lambda _error: self._lose_trainer(trainer)
        stopped = self._trainer_connections.stopped
        if stopped is not None and (run != self._run or stopped.code):
            self._try_anew(run)
        self._trainer_connections.add(trainer, body.since)
        self._advance()

    def _accepts(self, trainer: TrainerLine) -> bool:
        """Return whether a trainer's run is the one in force, or may become it; refuse the trainer if not."""
        accepted = self._run is None or trainer.run == self._run or self._machine.phase is Phase.OVER
        if not accepted:
            trainer.channel.close(Error(ErrorCode.WRONG_RUN))
        return accepted

    def _receive_trainer(self, trainer: TrainerLine, body: Body) -> None:
        if isinstance(body, Done | Failed) and body.run != trainer.run.id:
            trainer.channel.close(Error(ErrorCode.WRONG_RUN))
            self._lose_trainer(trainer)
        elif isinstance(body, End | Error):
            self._lose_trainer(trainer)
        elif (hear := FROM_TRAINERS.get(type(body))) is not None:
            hear(self._dispatcher, trainer, body)
        self._advance()

    def _lose_trainer(self, trainer: TrainerLine) -> None:
        if self._trainer_connections.remove(trainer.channel):
            trainer.channel.close()
            self._dispatcher.lose_trainer(trainer)
            self._advance()

    # -- events and actions

    def _puts_off(self) -> bool:
        """Return whether the first step still waits for peers on their way to their spans; at most OTHERS_S, and only once."""
        if not self._resources.awaits_others():
            return False
        if self._put_off_s is None:
            self._put_off_s = self._clock()
        return self._clock() < self._put_off_s + OTHERS_S

    @property
    def _run(self) -> Run | None:
        """Settings of the training run in force; None until the first rendezvous has ended."""
        return None if self._step_loop is None else self._step_loop.run

    @property
    def _going(self) -> StepLoop | None:
        """Loop over the steps of the training; None while the stages meet to agree on a step."""
        return None if self._machine.phase is Phase.RENDEZVOUS else self._step_loop

    def _advance(self) -> None:
        """Handle all events that have occurred, until none is due."""
        if self._advancing:  # a message that arrives meanwhile is looked at afterwards
            return
        self._advancing = True
        try:
            while self._machine.is_coordinator and (event := self._machine.due(self._has_come)) is not None:
                self._happen(event)
        finally:
            self._advancing = False

    def _has_come(self, event: Event) -> bool:
        if event is Event.GATHERED:
            self._recovery = self._recovery_plan()
            return self._recovery is not None
        return self._step_loop is not None and self._step_loop.has_come(event)

    def _happen(self, event: Event) -> None:
        for action in self._machine.on(event):
            if action is Action.CALL_ROLL:
                # Start a rendezvous: take a new term and ask every stage for its holdings.
                self._rendezvous = Rendezvous(self._resources.units, self._clock)
                self._set_term(self.term + (1 << TERM_BITS))
                for member in self._worker_group:
                    member.ask(self.term, self._dispatcher.key)
            elif action is Action.GATHER:
                # Send every stage to the step of the recovery plan. Trainers of other runs are refused, unless this run is at
                # its end and theirs can begin.
                assert self._recovery is not None
                run, found = self._recovery
                self._step_loop = self._steps(run, found.step)
                self._step_loop.gather(found)
                others = [trainer for trainer in self._trainer_connections if trainer.run != run]
                if others and self._step_loop.has_come(Event.FINISHED):
                    self._happen(Event.FINISHED)
                    self._try_anew(others[0].run)
                for trainer in others:
                    if not self._accepts(trainer):
                        self._trainer_connections.remove(trainer.channel)
            elif action is Action.BEGIN:
                assert self._next_run is not None
                self._dispatcher.clear()
                self._step_loop = self._steps(self._next_run, 0)
                self._step_loop.begin()
            elif self._step_loop is not None:
                steps = {
                    Action.LEASE: self._step_loop.lease,
                    Action.REDUCE: self._step_loop.reduce,
                    Action.COMMIT: self._step_loop.commit,
                    Action.STOP: self._step_loop.stop,
                }
                steps[action]()

    def _set_term(self, term: int) -> None:
        """Set the term and a new key for seals. They void earlier leases, which trainers may still hold."""
        self.term = self._dispatcher.term = term
        self._dispatcher.key = secrets.token_bytes(KEY_BYTES)
        self._dispatcher.clear()

    def _recovery_plan(self) -> tuple[Run, RecoveryPlan] | None:
        """Return the run in force and the plan that brings every stage to its next step; None if the rendezvous must go on.

        It needs the answers of all stages, or after a short wait those of enough stages to hold all layers. The run is the current
        one, else the furthest that a stage has begun, else one that a trainer offers.
        """
        if not (self._worker_group.all_answered or self._rendezvous.waited):
            return None
        members = self._worker_group.answered()
        offered = (trainer.run for trainer in self._trainer_connections)
        run = self._run or furthest_run(members) or next(offered, None)
        found = self._rendezvous.find(members, run) if run is not None and members else None
        return None if run is None or found is None else (run, found)

    def _steps(self, run: Run, step: int) -> StepLoop:
        return StepLoop(
            run,
            step,
            self._resources,
            self._worker_group,
            self._dispatcher,
            self._trainer_connections,
            self._averaging_groups,
            self._puts_off,
        )

    def _try_anew(self, run: Run) -> None:
        """Begin another run from the parameters of the last one, or the same run again after it was stopped."""
        self._trainer_connections.begin_anew()
        self._next_run = run
        self._happen(Event.SAME_RUN if run == self._run else Event.OTHER_RUN)


FROM_TRAINERS: Mapping[type[Body], Callable[[Dispatcher, TrainerLine, Any], None]] = {
    Done: Dispatcher.done,
    Failed: Dispatcher.failed,
}
"""Handlers of the messages that trainers send after their WORK (`docs/training-step.md`)."""
